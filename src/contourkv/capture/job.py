"""One capture job: a model, its contexts, a shard each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import provenance
from ..contexts import Context, read_contexts
from ..devices import device_name
from ..errors import InvalidInput
from ..models.geometry import attention_geometry
from ..models.loading import load_config, load_model, prepared_files, read_source
from ..parts import Parts
from ..progress import Progress
from .recording import capture_rows, check_ids, check_positions
from .shard import Shard, write_shard


def capture_contexts(
    model_folder: str | os.PathLike,
    contexts: str | os.PathLike,
    positions: Sequence[int] | None,
    outputs: Sequence[str | os.PathLike],
    device: str = "cpu",
    dtype: str | None = None,
    model_name: str | None = None,
    about: Mapping[str, object] | None = None,
    made_by: object = "",
) -> None:
    """Capture each context of a file into a shard of its own; the model is loaded once.

    A shard that is there already, whole, and made by this version from the same model files, context,
    positions, device and dtype is kept. Shards get their names when all are there; until then the finished ones are
    kept as parts (`contourkv.parts`). Every input is checked before the weights are read.

    Parameters
    ----------
    model_folder : holds config.json and *.safetensors, as `prepare_model` leaves them
    contexts : file that `write_contexts` wrote
    positions : query positions, the same in every context; None where each context names its own
    outputs : shard paths, one a context, in the file's order
    device, dtype : as `load_model` takes them; dtype None: what the model folder says
    model_name : what shards, progress and errors call the model; default the folder's name
    about : more to keep in each shard's metadata under `about`; another one makes another shard
    made_by : digest of the code that captures; parts of another are not used

    Raises
    ------
    InvalidInput
        An architecture that cannot be captured, a folder without weights, a context or position that the
        model cannot take, a number of outputs that is not the number of contexts.
    InvariantBroken
        See `capture_rows`.
    ContourKVError
        A shard cannot be written.

    Notes
    -----
    Metadata of a shard: `model`, `source` (source.json of the model folder), `arm`, `index`,
    `origin`, `length`, `positions`, `retrieval` (of a context that names them), `about`, `device`, `dtype`,
    `geometry`, `max_relative_error` (largest over layers), and `provenance` (package version and digest of all inputs).
    """
    folder, outputs = Path(model_folder), [Path(output) for output in outputs]
    name = model_name or folder.name
    config = load_config(folder)
    geometry = attention_geometry(config)
    texts = read_contexts(contexts)
    if len(outputs) != len(texts):
        raise InvalidInput(f"outputs: {len(outputs)} shards asked for, {contexts} holds {len(texts)} contexts")
    for context in texts:
        try:
            length = len(check_ids(context.ids, geometry, config.vocab_size, name))
            check_positions(_positions(context, positions), length)
        except InvalidInput as error:
            raise InvalidInput(f"{contexts}: context {context.arm}/{context.index:03d}: {error}") from error
    files = prepared_files(folder)

    inputs = []
    for context in texts:
        made_from = {
            "model": name,
            "files": files,
            "arm": context.arm,
            "index": context.index,
            "origin": context.origin,
            "ids": [int(token) for token in context.ids],
            "positions": _positions(context, positions),
            "device": str(device),
            "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }
        more = {"retrieval": context.retrieval, "about": dict(about or {})}
        made_from |= {key: value for key, value in more.items() if value}
        inputs.append(provenance.record(made_from))
    left = [at for at, output in enumerate(outputs) if not _is_there(output, inputs[at])]
    if not left:
        return
    with Parts(outputs[0], [inputs, made_by]) as parts:
        missing = [at for at in left if not _is_there(parts.path(f"{at:05d}.safetensors"), inputs[at])]
        if missing:
            model = load_model(folder, device=device, dtype=dtype)
        before = (len(left) - len(missing)) * geometry.layers
        progress = Progress(len(left) * geometry.layers, f"capture {name}", "layers", before=before)
        for at in missing:
            context = texts[at]
            rows = _positions(context, positions)
            layers = capture_rows(model, context.ids, rows, name, lambda layer: progress.advance())
            metadata = {
                "model": name,
                "source": read_source(folder),
                "arm": context.arm,
                "index": context.index,
                "origin": context.origin,
                "length": len(context.ids),
                "positions": rows,
                "device": device_name(device),
                "dtype": str(model.dtype).removeprefix("torch."),
                "geometry": asdict(geometry),
                "max_relative_error": max(rows.max_relative_error for rows in layers),
                "provenance": inputs[at],
            }
            if context.retrieval is not None:
                metadata["retrieval"] = context.retrieval
            if about:
                metadata["about"] = dict(about)
            write_shard(parts.path(f"{at:05d}.safetensors"), layers, metadata)
            del layers
        progress.close()
        for at in left:
            parts.give(f"{at:05d}.safetensors", outputs[at])


def _positions(context: Context, positions: Sequence[int] | None) -> list[int]:
    """Query positions of a context: the given ones, else its own."""
    if positions is None and not context.positions:
        raise InvalidInput("it names no query positions; give them")
    return [int(position) for position in (context.positions if positions is None else positions)]


def _is_there(output: Path, record: dict) -> bool:
    if not output.exists():
        return False
    try:
        shard = Shard(output)
        if shard.metadata.get("provenance") != record:
            return False
        shard.verify()
    except InvalidInput:
        return False
    return True
