"""What deployed methods lose on the rows of a model: the error of each kept set beside max-mass's and the pool's.

Paper, section 4. Every row of a forward pass is judged at each budget under each rule of `METHODS`; each rule sees the
context as it is when it ends with that row. The rows, and so max-mass and the pool, are those that `capture_rows`
takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from .capture.recording import Recorder, check_ids, check_positions, recording
from .capture.rows import LayerRows
from .contexts import Context, read_contexts
from .devices import device_name
from .enumeration.pool import MassPool, Neighbourhood, best_in_families
from .errors import ContourKVError, InvalidInput, InvariantBroken
from .measurement import families_of
from .models.geometry import AttentionGeometry, attention_geometry
from .models.loading import load_config, load_model, prepared_files, read_source
from .operator import Instance, dropped_mass, forced_error, spread, whole_number
from .press.observation import window_masses
from .progress import Progress
from .provenance import file_sha256, record
from .selectors import deployed, max_mass
from .statistics.columns import AUDITED
from .statistics.instances import SLACK_ABSOLUTE, SLACK_RELATIVE, read_columns, write_columns
from .statistics.table_parts import TableParts

ROWS_AT_ONCE = 256
"""Query positions whose attention is held at a time while H2O's sums are taken."""

Families = Mapping[int, Sequence[MassPool | Neighbourhood]]


class _View:
    """What the rules look at for one query position of a layer, over its n visible keys."""

    def __init__(self, rows: LayerRows, row: int, layer: _Layer) -> None:
        self.rows, self.row, self.layer = rows, row, layer
        self.position, self.keys = int(rows.positions[row]), rows.visible(row)
        self._windows: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        """n."""
        return self.keys.stop - self.keys.start

    def weights(self, heads: slice) -> np.ndarray:
        """The row's own weights in some query heads, (heads, n)."""
        return self.rows.p[self.row, heads, self.keys]

    def observed(self, head: int, count: int) -> np.ndarray:
        """Mean weights of the last `count` rows of the head's KV head, (1, n)."""
        if count not in self._windows:
            self._windows[count] = self.layer.observed(self.position, count)
        return self._windows[count][head // self.rows.group, self.keys][None]

    def accumulated(self, head: int) -> np.ndarray:
        """Summed weights of all rows so far of the head's KV head, (1, n)."""
        return self.layer.accumulated[self.position][head // self.rows.group, self.keys][None]

    def query(self, head: int) -> np.ndarray:
        return self.layer.queries[self.position][head]

    def held(self, head: int) -> np.ndarray:
        """Keys of the head's KV head, (n, d)."""
        return self.layer.keys[head // self.rows.group, self.keys]


METHODS: dict[str, Callable[[_View, int, int], np.ndarray]] = {
    "snapkv": lambda view, head, s: deployed.snapkv(view.observed(head, deployed.observation_window(s)), s),
    "h2o": lambda view, head, s: deployed.h2o(view.accumulated(head), s),
    "quest": lambda view, head, s: deployed.quest(view.query(head), view.held(head), s),
    "streaming_llm": lambda view, head, s: deployed.streaming_llm(view.size, s),
    "tova": lambda view, head, s: deployed.tova(view.weights(slice(head, head + 1)), s),
    "tova_layer": lambda view, head, s: deployed.tova(view.weights(slice(None)), s),
}
"""Name -> kept set of a query head at a budget.

`snapkv` and `h2o` choose once for the query heads of a KV head, `tova_layer` once for all heads of a layer, as the
published code does; `quest` chooses for each query head, `streaming_llm` without looking. `tova` asks the head's own
row alone, which is max-mass.
"""


class _Layer:
    """Queries and keys of one layer, and the sums over its attention that rules ask for."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, positions: Sequence[int], how: dict) -> None:
        self._query, self._key, self._how = query, key, how
        self.positions = [int(position) for position in positions]

    def observed(self, position: int, count: int) -> np.ndarray:
        """Mean over the last `count` rows up to `position` and the query heads of a KV head: (H, position + 1)."""
        stop = position + 1
        first = stop - count
        masses = window_masses(self._query[:, :, first:stop], self._key[:, :, :stop], rows=count, **self._how)
        return masses.mean[0].double().cpu().numpy()

    @cached_property
    def accumulated(self) -> dict[int, np.ndarray]:
        """position -> sums over all rows up to it, means over the query heads of a KV head: (H, position + 1)."""
        last = max(self.positions) + 1
        total = np.zeros((self._key.shape[1], last))
        found, start = {}, 0
        for stop in sorted({*range(ROWS_AT_ONCE, last, ROWS_AT_ONCE), *(at + 1 for at in self.positions)}):
            total[:, :stop] += (stop - start) * self.observed(stop - 1, stop - start)
            if stop - 1 in self.positions:
                found[stop - 1] = total[:, :stop].copy()
            start = stop
        return found

    @cached_property
    def queries(self) -> dict[int, np.ndarray]:
        """position -> (heads, d)."""
        return {at: self._query[0, :, at].double().cpu().numpy() for at in self.positions}

    @cached_property
    def keys(self) -> np.ndarray:
        """(H, N, d)."""
        return self._key[0].double().cpu().numpy()


@dataclass(frozen=True)
class _Plan:
    """What is asked of every row, checked."""

    budgets: tuple[int, ...]
    methods: tuple[str, ...]
    families: Families
    swap_keys: int

    @classmethod
    def of(cls, budgets: Sequence[int], methods: Sequence[str], families: Families, swap_keys: int) -> _Plan:
        budgets = tuple(whole_number("budgets", s, 1) for s in budgets)
        for name, values in (("budgets", budgets), ("methods", tuple(methods))):
            if not values or len(set(values)) < len(values):
                raise InvalidInput(f"{name}: expected at least one, none twice, got {list(values)}")
        for method in methods:
            if method not in METHODS:
                raise InvalidInput(f"methods: expected some of {', '.join(METHODS)}, got {method!r}")
        return cls(budgets, tuple(methods), families, swap_keys)

    def check(self, geometry: AttentionGeometry, positions: Sequence[int], length: int) -> np.ndarray:
        """Return the positions; raise InvalidInput unless every budget is below what each row sees."""
        positions = check_positions(positions, length)
        # A head's sink is one more key of a row, and each rule holds it: one cache entry less.
        least = 2 if geometry.sinks else 1
        for layer, window in enumerate(geometry.windows):
            seen = int(positions.min()) + 1 if window is None else min(int(positions.min()) + 1, window)
            for s in self.budgets:
                if not least <= s < seen:
                    raise InvalidInput(
                        f"budgets: expected whole numbers from {least} to {seen - 1} (the row of position "
                        f"{positions.min()} in layer {layer} sees {seen} keys), got {s}"
                    )
        return positions


class _Auditor(Recorder):
    """Judges the rows of each layer while the forward pass is there, and keeps the verdicts alone."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        length: int,
        positions: Sequence[int],
        name: str,
        plan: _Plan,
        wanted: frozenset[int],
        judged: Callable[[int], None] | None,
    ) -> None:
        super().__init__(geometry, length, positions, name)
        self.plan, self.wanted, self.judged = plan, wanted, judged
        self.frames: dict[int, pd.DataFrame] = {}

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
        number = module.layer_idx
        if number not in self.wanted:
            return
        super().record(module, query, key, value, output, scaling, softcap, sinks)
        rows = self._layers.pop(number)
        how = {
            "scaling": self.geometry.head_dim**-0.5 if scaling is None else scaling,
            "window": rows.window,
            "softcap": softcap,
            "sinks": sinks,
        }
        layer = _Layer(query, key, self.positions, how)
        self.frames[number] = pd.DataFrame.from_records(list(_judged_rows(rows, layer, self.plan, self.name)))
        if self.judged is not None:
            self.judged(number)

    def frame(self) -> pd.DataFrame:
        """All verdicts, by layer; raises ContourKVError if the forward pass left a layer out."""
        missing = sorted(self.wanted - set(self.frames))
        if missing:
            raise ContourKVError(
                f"model {self.name}: its forward pass did not call the registered attention function in layers "
                f"{missing}; this version of transformers may have changed how {self.geometry.architecture} attends"
            )
        return pd.concat([self.frames[layer] for layer in sorted(self.frames)], ignore_index=True)


def audit_context(
    model: PreTrainedModel,
    ids: Sequence[int],
    positions: Sequence[int],
    budgets: Sequence[int],
    *,
    methods: Sequence[str] = tuple(METHODS),
    families: Families | None = None,
    swap_keys: int = 256,
    layers: Sequence[int] | None = None,
    name: str | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """Judge the kept set of each method on the rows of one forward pass.

    Memory is that of the forward pass and of one layer: O(rows * N) a head, and 256 * N a head for H2O's sums.

    Parameters
    ----------
    model : transformers model of a supported architecture, in evaluation mode
    ids : N token ids
    positions : query positions in [0, N), distinct
    budgets : each below the number of keys that any of the rows sees
    methods : names of `METHODS`
    families : budget -> candidate families of `es_pool`, as `contourkv.measurement.families_of` gives them; a budget
        without families is not enumerated
    swap_keys : the heaviest keys that balance, around which a neighbourhood lies, may swap among
    layers : only these; default all
    name : what errors call the model; default its folder, else its architecture
    on_layer : called with the layer's number when it is judged

    Returns
    -------
    DataFrame
        A row for each layer, query head, position, budget and method: `layer`, `head`, `kv_head`, `position`, `s`,
        `method`; `es`, the forced error of the method's kept set in the units of the values; `mass`, its mass p(A);
        `es_max_mass`; `es_pool`, the exact minimum over the budget's families (a kept set beyond them may lie below
        it), NaN without any; `dropped_mass` of max-mass; `spread`, the row's D, in whose units errors of different
        layers compare. `es` is NaN where the weights of all kept keys underflow
        to 0, so that they have no renormalised output in float64.

    Raises
    ------
    InvalidInput
        Before any compute: unsupported architecture, ids or positions that the model cannot take, a budget that is
        not below what some row sees, an unknown method or layer.
    InvariantBroken
        As of `capture_rows`; an error above 2 D (1 - p(A)), which Lemma 2.1's argument gives for any kept set;
        `es_pool` above `es_max_mass`; a kept set heavier than max-mass.

    Notes
    -----
    Where a head has an attention sink, a score that no rule can evict, every rule keeps it as one of its s keys.
    """
    geometry = attention_geometry(model.config)
    name = name or getattr(model.config, "_name_or_path", "") or geometry.architecture
    ids = check_ids(ids, geometry, model.config.vocab_size, name)
    plan = _Plan.of(budgets, methods, families or {}, swap_keys)
    positions = plan.check(geometry, positions, len(ids))
    wanted = frozenset(range(geometry.layers) if layers is None else layers)
    if not wanted or not wanted <= set(range(geometry.layers)):
        raise InvalidInput(f"layers: expected some of 0..{geometry.layers - 1}, got {sorted(wanted)}")
    auditor = _Auditor(geometry, len(ids), positions, name, plan, wanted, on_layer)
    inputs = torch.tensor([ids], dtype=torch.long, device=model.device)
    with torch.no_grad(), recording(model, auditor):
        model.base_model(input_ids=inputs, use_cache=False)
    return auditor.frame()


def audit_file(
    model_folder: str | os.PathLike,
    contexts: str | os.PathLike,
    output: str | os.PathLike,
    settings: Mapping,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    model_name: str | None = None,
    made_by: object = "",
) -> None:
    """Audit every context of a file and write the verdicts (parquet, columns `statistics.columns.AUDITED`) to `output`.

    Every input is checked before the weights are read; nothing is under the final name before all is there.

    Parameters
    ----------
    model_folder : prepared model
    contexts : file that `write_contexts` wrote
    settings : the config section `audit`: positions, budgets, methods, families (entries as in `enumeration`; a budget
        that none names has no `es_pool`), swap_keys
    device, dtype : as `load_model` takes them; dtype None: what the model folder says
    model_name : what results, progress and errors call the model; default the folder's name
    made_by : digest of the code that computes this; parts of another are not used

    Raises
    ------
    InvalidInput, InvariantBroken
        As of `audit_context`; a folder or a file that cannot be read.
    """
    folder = Path(model_folder)
    name = model_name or folder.name
    config = load_config(folder)
    geometry = attention_geometry(config)
    named = {entry["budget"] for entry in settings["families"]}
    enumerated = {"budgets": [s for s in settings["budgets"] if s in named], "families": settings["families"]}
    families = families_of(enumerated)
    plan = _Plan.of(settings["budgets"], settings["methods"], families, settings["swap_keys"])
    texts = read_contexts(contexts)
    for context in texts:
        try:
            ids = check_ids(context.ids, geometry, config.vocab_size, name)
            plan.check(geometry, settings["positions"], len(ids))
        except InvalidInput as error:
            raise InvalidInput(f"{contexts}: context {context.name}: {error}") from error
    weights = {name: found for name, found in prepared_files(folder).items() if name.endswith(".safetensors")}
    made_from = {
        "audit": dict(settings),
        "contexts": file_sha256(contexts),
        "model": weights,
        "device": device_name(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    model = load_model(folder, device=device, dtype=dtype)
    with TableParts(output, {**made_from, "name": name, "made_by": made_by}, AUDITED) as parts:
        named = [f"{context.arm}-{context.index:03d}" for context in texts]
        before = geometry.layers * sum(map(parts.has, named))
        progress = Progress(len(texts) * geometry.layers, f"audit {name}", "layers", before=before)

        def audited(context: Context) -> pd.DataFrame:
            frame = audit_context(
                model,
                context.ids,
                settings["positions"],
                plan.budgets,
                methods=plan.methods,
                families=families,
                swap_keys=plan.swap_keys,
                name=f"{name}, context {context.name}",
                on_layer=lambda layer: progress.advance(),
            )
            return frame.assign(model=name, arm=context.arm, input=context.name)

        frames = [parts.table(part, partial(audited, context)) for part, context in zip(named, texts, strict=True)]
        progress.close()
        meta = record(
            made_from,
            devices={"measurement": device_name(device)},
            model={"name": name, "revision": read_source(folder).get("revision")},
            seeds={f"contexts.{context.arm}": context.origin.get("seed") for context in texts},
        )
        write_columns(output, pd.concat(frames, ignore_index=True), AUDITED, meta)


def read_audit(path: str | os.PathLike) -> tuple[pd.DataFrame, dict]:
    """Read what `audit_file` wrote: the verdicts, and their provenance.

    Raises
    ------
    InvalidInput
        A file that is missing, truncated, not ours or without a column; it is named, with what to do.
    """
    return read_columns(path, AUDITED)


def _judged_rows(rows: LayerRows, layer: _Layer, plan: _Plan, name: str) -> Iterator[dict[str, object]]:
    """One record for each query head, position, budget and method of a layer."""
    views = [_View(rows, row, layer) for row in range(len(rows.positions))]
    for head in range(rows.heads):
        for view in views:
            captured = rows.row(view.row, head)
            where = {"layer": rows.layer, "head": head, "kv_head": captured.kv_head, "position": view.position}
            place = f"model {name}, " + ", ".join(f"{key} {value}" for key, value in where.items())
            instance = Instance(captured.p, captured.v)
            # From a visible key to its place in the instance, which leaves weightless keys out and may end in a sink.
            real = captured.keys >= 0
            index = np.full(view.size, -1)
            index[captured.keys[real] - view.keys.start] = np.flatnonzero(real)
            sink = np.flatnonzero(~real)
            distance = spread(instance)
            for s in plan.budgets:
                best = _best(instance, s, plan, place)
                for method in plan.methods:
                    kept = index[METHODS[method](view, head, s if rows.sink is None else s - 1)]
                    kept = np.append(kept[kept >= 0], sink)
                    verdict = {
                        "es": forced_error(instance, kept) if kept.size else np.nan,
                        "mass": float(instance.p[kept].sum()),
                        **best,
                        "spread": distance,
                    }
                    _check(verdict, f"{place}, s {s}, method {method}")
                    yield {**where, "s": s, "method": method, **verdict}


def _best(instance: Instance, s: int, plan: _Plan, place: str) -> dict[str, float]:
    """The columns that no method changes."""
    pool = np.nan
    try:
        heaviest = max_mass(instance, s)
        if s in plan.families:
            found = best_in_families(instance, s, plan.families[s], plan.swap_keys)
            # Summed as every other kept set is, so that equal sets have equal errors.
            pool = forced_error(instance, found.kept)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error}") from None
    return {
        "es_max_mass": forced_error(instance, heaviest),
        "es_pool": pool,
        "dropped_mass": dropped_mass(instance, s),
    }


def _check(verdict: Mapping[str, float], place: str) -> None:
    distance = verdict["spread"]

    def at_most(low: float, high: float, statement: str) -> None:
        if low > high * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE * max(1.0, distance):
            raise InvariantBroken(f"{statement}: {place}: {low:.17g} > {high:.17g}")

    at_most(verdict["es"], 2 * distance * (1 - verdict["mass"]), "the error is above 2 D (1 - p(A))")
    at_most(verdict["mass"], 1 - verdict["dropped_mass"], "the kept set is heavier than max-mass")
    at_most(verdict["es_max_mass"], 2 * distance * verdict["dropped_mass"], "Lemma 2.1 does not hold")
    at_most(verdict["es_pool"], verdict["es_max_mass"], "the pool's minimum is above max-mass")
