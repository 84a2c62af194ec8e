r"""What eviction costs the model itself: kept sets chosen row by row in its own forward pass (paper, section 4).

The first `start` tokens of a context are read as they are. From then on the row of every query position, in every
(layer, query head) cell, is replaced by the renormalised output m_A of a kept set of s keys, which the cell's rule
chooses from the row's weights p and from the values of its KV head as they are in this very pass; the next layer
goes on with it. The loss is the mean cross-entropy of the tokens from `start` on, teacher-forced. A row that is
selected at position t decides the token at t + 1, so the first of them is predicted from a dense row, the same
under all rules.

Rows, their check against the model's own output, and the attention of the rows before `start` are those of
`contourkv.capture`: scores in float32, softmax and all after it in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from .capture.recording import OVER_EAGER, OVER_SDPA, Recorder, check_ids, recording
from .capture.rows import LayerRows
from .contexts.storage import Context, read_contexts
from .devices import device_name
from .errors import InvalidInput
from .models.geometry import AttentionGeometry, attention_geometry
from .models.loading import load_config, load_model, prepared_files, read_source
from .operator import mass_order, whole_number
from .progress import Progress
from .provenance import record
from .selectors.swap import descend
from .statistics.columns import LOSSES, VARIANTS
from .statistics.instances import write_columns
from .statistics.ratios import FLAT, derive
from .statistics.table_parts import TableParts

RULES = ("dense", "max_mass", "balance")
"""A cell's rule by its number: every visible key, the s heaviest, or the swap rule from these (paper, section 2)."""
DENSE, MAX_MASS, BALANCE = range(len(RULES))

# Which rule, in which cell


@dataclass(frozen=True, eq=False)
class Selection:
    """The rule of every cell, and how many keys it keeps.

    Attributes
    ----------
    rules : (layers, heads) int8
        Index into `RULES`; given as such or as names.
    s : int
        Keys kept in a row, >= 1. A row that sees no more stays dense. An attention sink is a parameter of the
        model and no entry of the cache: it is always kept, and is none of the s.
    candidates : int
        Balance swaps among so many of the heaviest keys; by default 256 or twice s, whichever is more.

    Raises
    ------
    InvalidInput
        Rules that are no (layers, heads) array of names or numbers of `RULES`, s < 1, fewer candidates than s.
    """

    rules: ArrayLike
    s: int = 8
    candidates: int | None = None

    def __post_init__(self) -> None:
        s = whole_number("s", self.s, 1)
        candidates = max(256, 2 * s) if self.candidates is None else whole_number("candidates", self.candidates)
        if candidates < s:
            raise InvalidInput(f"candidates: expected at least the budget {s}, got {candidates}")
        for name, value in (("rules", _rule_numbers(self.rules)), ("s", s), ("candidates", candidates)):
            object.__setattr__(self, name, value)

    def check(self, geometry: AttentionGeometry) -> None:
        """Raise InvalidInput unless there is a rule for each cell of such a model."""
        cells = (geometry.layers, geometry.heads)
        if self.rules.shape != cells:
            raise InvalidInput(f"rules: expected one a (layer, query head), {cells}, got shape {self.rules.shape}")


def _rule_numbers(rules: ArrayLike) -> np.ndarray:
    try:
        given = np.asarray(rules)
    except ValueError:  # lines of unequal length
        given = np.empty(0)
    if given.ndim != 2 or given.size == 0:
        raise InvalidInput(f"rules: expected a (layers, heads) array, got {_shown(rules)}")
    if given.dtype.kind in "iu":
        wrong = given[(given < 0) | (given >= len(RULES))]
        numbers = given.astype(np.int8)
    else:
        numbers = np.full(given.shape, -1, np.int8)
        for number, rule in enumerate(RULES):
            numbers[given == rule] = number
        wrong = given[numbers < 0]
    if wrong.size:
        raise InvalidInput(
            f"rules: expected {', '.join(RULES)} or their numbers 0..{len(RULES) - 1}, got {wrong.tolist()[0]!r}"
        )
    numbers.setflags(write=False)
    return numbers


def _shown(value: object) -> str:
    return f"shape {value.shape}" if isinstance(value, np.ndarray) else repr(value)[:80]


@dataclass(frozen=True, eq=False)
class FlatCells:
    """Cells where max-mass leaves something to close, and the contexts that say so.

    Attributes
    ----------
    model : str
    s : int
        Budget that they are flat at.
    threshold : float
        A cell is flat where its median kappa-hat is at least this.
    cells : (layers, heads) bool
    inputs : tuple of str
        The contexts of the instances, as "<arm>/<index>", sorted.
    """

    model: str
    s: int
    threshold: float
    cells: np.ndarray
    inputs: tuple[str, ...]


def flat_cells(frame: pd.DataFrame, s: int = 8, threshold: float = FLAT, model: str | None = None) -> FlatCells:
    """The flat cells of a model: median kappa-hat over the instances at `s` at least `threshold` (paper, section 3).

    Parameters
    ----------
    frame : DataFrame
        Instances, with the columns `statistics.instances.MEASURED`.
    s : int
    threshold : float
    model : str, optional
        Which one, where the frame has several.

    Raises
    ------
    InvalidInput
        Several models and none named, no instance of that model and budget, a cell without one.
    """
    names = sorted(set(frame["model"].astype(str)))
    if model is None:
        if len(names) != 1:
            raise InvalidInput(f"model: the instances are of {', '.join(names) or 'none'}; name one")
        model = names[0]
    budgets = sorted(set(frame.loc[frame["model"].astype(str) == model, "s"]))
    part = frame[(frame["model"].astype(str) == model) & (frame["s"] == s)]
    if part.empty:
        has = f"those of {model} have s = {', '.join(map(str, budgets))}" if budgets else f"models: {', '.join(names)}"
        raise InvalidInput(f"instances: none of model {model} at s = {s}; {has}")
    medians = derive(part).groupby(["layer", "head"])["kappa_hat"].median()
    layers, heads = (int(part[name].max()) + 1 for name in ("layer", "head"))
    if len(medians) < layers * heads:
        every = pd.MultiIndex.from_product([range(layers), range(heads)])
        layer, head = every.difference(medians.index)[0]
        raise InvalidInput(f"instances: no row of model {model} at s = {s} in layer {layer}, head {head}")
    cells = medians.sort_index().to_numpy().reshape(layers, heads) >= threshold
    return FlatCells(model, int(s), float(threshold), cells, tuple(sorted(set(part["input"].astype(str)))))


# The forward pass


def continuation_loss(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    rules: ArrayLike,
    s: int = 8,
    candidates: int | None = None,
) -> float:
    """Mean cross-entropy, in nats a token, of a context from `start` on; see `continuation_nats`."""
    return float(continuation_nats(model, ids, start, Selection(rules, s, candidates)).mean())


def continuation_nats(
    model: PreTrainedModel,
    ids: Sequence[int],
    start: int,
    selection: Selection,
    name: str | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Cross-entropy of each token of a context from `start` on, its rows attending to kept sets alone.

    One forward pass of a batch of one over all tokens but the last, without a KV cache and without gradients; the
    model is left as it was, whatever ends the pass.

    Parameters
    ----------
    model : transformers model of a supported architecture with its language-model head, in evaluation mode
    ids : N token ids
    start : 1 <= start <= N - 2
        First token that is scored, and first query position whose rows are selected.
    selection : Selection
    name : what errors call the model; default its folder, else its architecture
    on_layer : called with the layer's number when its attention is done

    Returns
    -------
    (N - start,) float64
        -log p(ids[t] | ids[:t]) for t = start .. N - 1, in nats: logits as the model gives them, the rest in float64.

    Raises
    ------
    InvalidInput
        Before any compute: an unsupported architecture or attention (flash, flex), a model without its head or in
        training mode, token ids that it cannot read, a start outside the range, rules that are not one a cell.
    InvariantBroken
        See `contourkv.capture.capture_rows`.
    """
    geometry = attention_geometry(model.config)
    name = name or getattr(model.config, "_name_or_path", "") or geometry.architecture
    _check_model(model, name)
    selection.check(geometry)
    ids = check_ids(ids, geometry, model.config.vocab_size, name)
    _check_start(start, len(ids))
    recorder = _Selector(geometry, len(ids) - 1, int(start), name, selection, on_layer)
    inputs = torch.tensor([ids[:-1]], dtype=torch.long, device=model.device)
    with torch.no_grad(), recording(model, recorder):
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=len(ids) - int(start)).logits[0]
    recorder.layers()
    wide, target = logits.double(), torch.tensor(ids[start:], device=logits.device)
    likelihood = wide.gather(1, target[:, None]).squeeze(1) - torch.logsumexp(wide, dim=1)
    return (-likelihood).cpu().numpy()


def _check_start(start: int, length: int) -> None:
    if whole_number("start", start) < 1 or start > length - 2:
        raise InvalidInput(
            f"start: expected 1 to {length - 2} in a context of {length} tokens, so that a row is selected that "
            f"predicts one of them, got {start}"
        )


def _check_model(model: PreTrainedModel, name: str) -> None:
    if model.get_output_embeddings() is None:
        raise InvalidInput(f"model {name}: it has no language-model head to give a loss; load the causal model")
    if model.training:
        raise InvalidInput(f"model {name}: it is in training mode; call model.eval() first")
    attends = model.config._attn_implementation
    # The two of capture are refused by `recording` itself, which knows why they are there.
    if attends not in ("sdpa", "eager", OVER_SDPA, OVER_EAGER):
        raise InvalidInput(
            f"model {name}: it attends by {attends!r}, whose rows cannot be selected; "
            'load it with attn_implementation="sdpa" or "eager"'
        )


class _Selector(Recorder):
    """Takes the rows from `start` on, and writes the outputs of their kept sets over the dense ones."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        length: int,
        start: int,
        name: str,
        selection: Selection,
        on_layer: Callable[[int], None] | None,
    ) -> None:
        super().__init__(geometry, length, range(start, length), name)
        self.selection, self.done = selection, on_layer

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        layer = module.layer_idx
        if (self.selection.rules[layer] != DENSE).any():
            super().record(module, query, key, value, output, scaling, softcap, sinks)
            # `output` is the tensor that the model goes on with.
            self._select(self._layers[layer], output)
        # Nobody asks for the rows again, only whether all layers were there.
        self._layers[layer] = None
        if self.done is not None:
            self.done(layer)

    def _select(self, rows: LayerRows, output: torch.Tensor) -> None:
        s, candidates = self.selection.s, self.selection.candidates
        for kv_head in range(rows.kv_heads):
            heads = range(*rows.heads_of(kv_head).indices(rows.heads))
            ruled = [(head, int(self.selection.rules[rows.layer, head])) for head in heads]
            if all(rule == DENSE for _, rule in ruled):
                continue
            v = rows.v[kv_head].astype(np.float64)
            for head, rule in ruled:
                p = rows.p[:, head]
                several = np.flatnonzero((p > 0).sum(axis=1) > s)
                if rule == DENSE or several.size == 0:
                    continue
                p, sink = p[several], None if rows.sink is None else rows.sink[several, head]
                kept = kept_sets(p, v, RULES[rule], s, candidates, sink)
                found = torch.from_numpy(renormalised(p, v, kept, sink))
                places = torch.from_numpy(rows.positions[several]).to(output.device)
                output[0, places, head] = found.to(output)


def kept_sets(
    p: np.ndarray, v: np.ndarray, rule: str, s: int, candidates: int, sink: np.ndarray | None = None
) -> np.ndarray:
    """The kept set of each row of one query head, as `selectors.max_mass` and `selectors.balance` choose it.

    Parameters
    ----------
    p : (R, N) float64
        Softmax weights; 0 at keys that the row does not see. More than s of each row are positive.
    v : (N, d) float64
        Values of the KV head.
    rule : "max_mass" or "balance"
    s : keys kept
    candidates : balance swaps among so many of the heaviest keys, >= s
    sink : (R,) float64, optional
        Weight of the attention sink: a key of value zero beside the s that is always kept.

    Returns
    -------
    (R, s) int64
        Keys of each row, sorted.
    """
    order = mass_order(p)
    if rule == "max_mass":
        return np.sort(order[:, :s], axis=1)
    order, seen = order[:, :candidates], (p > 0).sum(axis=1)
    mu = p @ v  # a sink adds nothing: its value is zero
    fixed = 0 if sink is None else 1
    start = np.arange(fixed + s)
    kept = np.empty((len(p), s), np.int64)
    for row in range(len(p)):
        keys = order[row, : seen[row]]
        mass = p[row, keys]
        g = mass[:, None] * (v[keys] - mu[row])
        if sink is not None:
            mass, g = np.append(sink[row], mass), np.vstack([-sink[row] * mu[row], g])
        ranks = descend(g, mass, g @ g.T, start, fixed, mass.size)
        kept[row] = np.sort(keys[ranks[fixed:] - fixed])
    return kept


def renormalised(p: np.ndarray, v: np.ndarray, kept: np.ndarray, sink: np.ndarray | None = None) -> np.ndarray:
    """m_A of each row: sum_{j in A} p_j v_j / p(A), a sink's weight counted in p(A) (paper, section 1).

    `p` (R, N) and `v` (N, d) float64, `kept` (R, s) key indices, `sink` (R,) weights; returns (R, d) float64.
    """
    mass = np.take_along_axis(p, kept, axis=1)
    total = mass.sum(axis=1) + (0.0 if sink is None else sink)
    return np.einsum("rs,rsd->rd", mass, v[kept]) / total[:, None]


# The losses of a file of contexts


@dataclass(frozen=True)
class LossSettings:
    """What is measured: the mapping `loss` of the configuration.

    Attributes
    ----------
    s : int
        Keys kept in a row, >= 1.
    continuation : int
        Tokens at the end of each context that are scored, >= 2.
    candidates : int
        See `Selection`.
    """

    s: int = 8
    continuation: int = 128
    candidates: int | None = None

    def __post_init__(self) -> None:
        whole_number("loss.continuation", self.continuation, 2)
        try:
            made = Selection([["dense"]], self.s, self.candidates)
        except InvalidInput as error:
            raise InvalidInput(f"loss.{error}") from None
        object.__setattr__(self, "candidates", made.candidates)

    @classmethod
    def of(cls, mapping: Mapping[str, object]) -> LossSettings:
        """From the configuration's mapping; InvalidInput for a key that is not one of the attributes."""
        for name in mapping:
            if name not in cls.__dataclass_fields__:
                expected = ", ".join(cls.__dataclass_fields__)
                raise InvalidInput(f"loss.{name}: no such key; expected some of {expected}")
        return cls(**mapping)


def losses_file(
    model_folder: str | os.PathLike,
    contexts: str | os.PathLike,
    output: str | os.PathLike,
    flat: FlatCells,
    settings: Mapping[str, object] | LossSettings,
    device: str = "cpu",
    dtype: str | None = None,
    model_name: str | None = None,
    made_by: object = "",
) -> None:
    """Loss of every context of a file under each of `VARIANTS`, written as parquet with the columns `LOSSES`.

    Every input is checked before the weights are read; nothing is written unless all of it is there. Provenance
    names, under `flat_cells`, the cells and the contexts that they come from.

    Parameters
    ----------
    model_folder : holds config.json and *.safetensors, as `prepare_model` leaves them
    contexts : file that `write_contexts` wrote
    output : path of the parquet file
    flat : FlatCells
        Of this model, from other contexts.
    settings : LossSettings or its mapping
    device, dtype : as `load_model` takes them; dtype None: what the model folder says
    model_name : what the table, progress and errors call the model; default the folder's name
    made_by : digest of the code that computes this; parts of another are not used

    Raises
    ------
    InvalidInput
        See `continuation_nats`; flat cells of another model, or from one of these contexts; a context that is too
        short or comes twice; settings that are not sound.
    InvariantBroken
        See `contourkv.capture.capture_rows`.
    """
    settings = settings if isinstance(settings, LossSettings) else LossSettings.of(settings)
    folder = Path(model_folder)
    name = model_name or folder.name
    config = load_config(folder)
    geometry = attention_geometry(config)
    cells = (geometry.layers, geometry.heads)
    if (flat.model, flat.cells.shape) != (name, cells):
        raise InvalidInput(
            f"flat: cells of model {flat.model}, {flat.cells.shape}, were given for model {name}, which has {cells}"
        )
    texts = read_contexts(contexts)
    for context in texts:
        try:
            length = len(check_ids(context.ids, geometry, config.vocab_size, name))
            if length <= settings.continuation:
                raise InvalidInput(
                    f"it has {length} tokens, loss.continuation scores the last {settings.continuation} and needs "
                    "at least one before them"
                )
        except InvalidInput as error:
            raise InvalidInput(f"{contexts}: context {context.name}: {error}") from None
    _check_apart(contexts, texts, flat)

    variants = {
        "dense": np.full(cells, DENSE),
        "max_mass": np.full(cells, MAX_MASS),
        "balance": np.full(cells, BALANCE),
        "flat_balance": np.where(flat.cells, BALANCE, MAX_MASS),
    }
    selections = {key: Selection(rules, settings.s, settings.candidates) for key, rules in variants.items()}
    model = load_model(folder, device=device, dtype=dtype)
    source = read_source(folder)
    dtype = str(model.dtype).removeprefix("torch.")
    measured = {"s": settings.s, "continuation": settings.continuation, "candidates": settings.candidates}
    found = {
        "s": flat.s,
        "threshold": flat.threshold,
        "cells": np.argwhere(flat.cells).tolist(),
        "inputs": list(flat.inputs),
    }
    made_from = {
        "loss": measured,
        "flat_cells": found,
        "source": source,
        "contexts": [(context.name, context.ids) for context in texts],
        "device": device_name(device),
        "dtype": dtype,
    }
    metadata = record(
        made_from,
        devices={"measurement": device_name(device)},
        model={"name": name, "revision": source.get("revision")},
        seeds={f"contexts.{context.arm}": context.origin.get("seed") for context in texts},
        loss=measured,
        flat_cells=found,
        dtype=dtype,
    )
    per_context = len(VARIANTS) * geometry.layers
    with TableParts(
        output, {**made_from, "name": name, "files": prepared_files(folder), "made_by": made_by}, LOSSES
    ) as parts:
        named = [f"{context.arm}-{context.index:03d}" for context in texts]
        before = per_context * sum(map(parts.has, named))
        progress = Progress(len(texts) * per_context, f"loss {name}", "layers", before=before)

        def lost(context: Context) -> pd.DataFrame:
            start, records = len(context.ids) - settings.continuation, []
            for variant in VARIANTS:
                nats = continuation_nats(
                    model, context.ids, start, selections[variant], name, lambda layer: progress.advance()
                )
                records.append(
                    {
                        "model": name,
                        "arm": context.arm,
                        "input": context.name,
                        "variant": variant,
                        "s": settings.s,
                        "candidates": settings.candidates,
                        "start": start,
                        "tokens": nats.size,
                        "nats": float(nats.mean()),
                        "flat_cells": int(flat.cells.sum()),
                        "cells": flat.cells.size,
                    }
                )
            return pd.DataFrame.from_records(records)

        frames = [parts.table(part, partial(lost, context)) for part, context in zip(named, texts, strict=True)]
        progress.close()
        write_columns(output, pd.concat(frames, ignore_index=True), LOSSES, metadata)


def _check_apart(path: str | os.PathLike, texts: Sequence[Context], flat: FlatCells) -> None:
    if not texts:
        raise InvalidInput(f"{path}: it holds no context; make the contexts again")
    names = [context.name for context in texts]
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    if twice is not None:
        raise InvalidInput(f"{path}: context {twice} comes twice; make the contexts again")
    seen = next((name for name in names if name in flat.inputs), None)
    if seen is not None:
        raise InvalidInput(
            f"{path}: context {seen} is one of the {len(flat.inputs)} that the flat cells come from; "
            "measure the loss on others"
        )
