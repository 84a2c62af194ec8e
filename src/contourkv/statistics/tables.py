"""The tables of a run, each from the instances table alone.

Everywhere: x, x_low, x_high are a point estimate and its 95% percentile interval over resampled inputs;
`inputs` counts the contexts behind a row of the table, `n` its instances. `against` says which error stands
below the fraction: es_pool, the exact minimum over the configured family, or es_best, the least error known.
Instances are pooled as they are, each counting once.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import DamagedFile, InvalidInput, said
from ..progress import Progress
from ..provenance import VERSION, atomic_path, digest, write_text
from .bootstrap import Estimate, Scope
from .estimators import auc_by_resample, weighted_share
from .instances import check_invariants
from .merging import read_many
from .ratios import FLAT, GAP, derive

ALL_MODELS = "all models"
ALL_BUDGETS = "all"
AGAINST = {"es_pool": "hat", "es_best": "best"}
MATERIAL = 1e-6
"""Relative difference from which one error counts as materially less than another in the certificates table."""
PREDICTORS = ("dropped_mass", "phi", "spectral", "absolute_bound")
"""Columns that may tell a row's kappa or error in advance."""
ALL_ARMS = "all arms"
SHOWN_ROWS = 80

Rows = list[dict]


def build_tables(
    frame: pd.DataFrame,
    resamples: int,
    seed: int,
    labels: Mapping[str, str] | None = None,
    families: Sequence[Mapping[str, int]] | None = None,
    apart: Collection[str] = (),
) -> dict[str, pd.DataFrame]:
    """All tables of a run.

    Parameters
    ----------
    frame : DataFrame
        Instances; checked first, see `check_invariants`.
    resamples : int
        Bootstrap resamples of the inputs.
    seed : int
        Seed of the bootstrap.
    labels : model -> label, optional
        What to call the models, in the order to show them; without it, their names in alphabetical order.
    families : list of {budget, core, pool} or {budget, free, pool}, optional
        Candidate families behind es_pool, only to be named in the `pools` table.
    apart : models
        That all models together leave out, see `by_model`. The table `invariants` counts every row all the same.

    Returns
    -------
    dict of DataFrame
        ceiling, kappa, recovered, content_arms, prediction, predictors, edges, cells, certificates, pools,
        invariants, kappa_quantiles. Each carries a one-line `attrs["caption"]`.
    """
    if len(frame) == 0:
        raise InvalidInput("instances: no rows to make tables of; run the enumeration first")
    check_invariants(frame)
    run = _Run(derive(frame), resamples, seed, labels, families, apart)
    tables = {}
    progress = Progress(len(BUILDERS), "tables", "tables")
    for name in progress.over(BUILDERS):
        builder, caption = BUILDERS[name]
        table = pd.DataFrame(builder(run))
        table.attrs["caption"] = caption.format(s=run.reference, flat=FLAT) + run.reference_note * ("{s}" in caption)
        tables[name] = table
    return tables


def write_tables(tables: Mapping[str, pd.DataFrame], folder: str | os.PathLike, metadata: dict) -> list[Path]:
    """Write each table as <name>.csv and <name>.md into `folder`.

    The csv keeps 10 significant digits and ends in a constant column `provenance`; the md has the caption,
    "point [low, high]" in one column, and the provenance as its last line.

    Returns
    -------
    list of Path
        The files written.
    """
    line = provenance_line(metadata)
    written = []
    for name, table in tables.items():
        csv, md = Path(folder) / f"{name}.csv", Path(folder) / f"{name}.md"
        with atomic_path(csv) as temporary:
            table.assign(provenance=line).to_csv(
                temporary, index=False, float_format="%.10g", lineterminator="\n", encoding="utf-8"
            )
        caption = table.attrs.get("caption", name)
        write_text(md, f"{caption}\n\n{markdown(table, name)}\nProvenance: {line}\n")
        written += [csv, md]
    return written


def write_joined_table(
    name: str,
    build: Callable[..., pd.DataFrame],
    columns: Mapping[str, str],
    paths: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    run: str,
    labels: Mapping[str, str],
    statistics: Mapping[str, int],
    **more: object,
) -> list[Path]:
    """Write the table `name` that `build` makes of several parquet files' rows.

    Parameters
    ----------
    build : called as build(frame, resamples, seed, labels=labels, **more)
    columns : of the files, name -> dtype
    paths : files
    folder, run : where it goes, and the run's name for the provenance
    labels : model -> label, in the order to show them
    statistics : resamples, seed
    """
    frame, metadata = read_many(paths, dict(columns))
    table = build(frame, **statistics, labels=labels, **more)
    return write_tables({name: table}, folder, {**metadata, "run": run, "statistics": statistics})


def read_tables(folder: str | os.PathLike) -> dict[str, pd.DataFrame]:
    """Read every table that `write_tables` wrote into `folder`, without the column `provenance`."""
    tables = {}
    for path in sorted(Path(folder).glob("*.csv")):
        tables[path.stem] = read_table(path).drop(columns="provenance", errors="ignore")
    return tables


def read_table(path: str | os.PathLike) -> pd.DataFrame:
    """Read one csv table; `s` and the text columns come back as text, an empty note as ""."""
    if not Path(path).is_file():
        raise InvalidInput(f"{path}: no such table; run the rule `statistics`")
    text = {name: str for name in ("model", "arm", "s", "against", "note", "families", "provenance")}
    content = Path(path).read_bytes()
    try:
        table = pd.read_csv(io.BytesIO(content), dtype=text, encoding="utf-8")
    except ValueError as error:  # pandas' own errors are ValueErrors
        raise DamagedFile(path, f"not a whole table ({said(error)})") from error
    # It is the last column of each row that is written, and a whole file ends its last line.
    if "provenance" not in table or table["provenance"].isna().any() or not content.endswith(b"\n"):
        raise DamagedFile(path, "not a whole table of a run (rows without provenance)")
    kept = [name for name in text if name in table]
    table[kept] = table[kept].fillna("")
    return table


def provenance_line(metadata: dict) -> str:
    """The provenance of a result in one line: version, config digests, models with revisions, devices, seeds."""
    configs = metadata.get("config", [])
    configs = [configs] if isinstance(configs, str) else list(configs)
    shown = "+".join(configs) if len(configs) <= 3 else f"{digest(configs)} (of {len(configs)} digests)"
    models = [
        str(model.get("name", "?")) + (f"@{model['revision']}" if model.get("revision") else "")
        for model in metadata.get("models", [])
    ]
    parts = [f"contourkv {metadata.get('contourkv', VERSION)}"]
    others = [version for version in metadata.get("made_with", []) if version != parts[0].split()[1]]
    parts += [f"measured with {', '.join(others)}"] if others else []
    parts += [f"config {shown}"] if shown else []
    parts += [f"models {', '.join(models)}"] if models else []
    devices = sorted({name for names in (metadata.get("devices") or {}).values() for name in names})
    parts += [f"computed on {', '.join(devices)}"] if devices else []
    seeds = metadata.get("seeds") or {}
    parts += ["seeds " + " ".join(f"{name}={_joined(value)}" for name, value in seeds.items())] if seeds else []
    draws = metadata.get("statistics") or {}
    parts += [f"bootstrap {draws['resamples']} resamples, seed {draws['seed']}"] if draws else []
    return "; ".join(parts)


def markdown(table: pd.DataFrame, name: str = "") -> str:
    """`table` as a markdown table, intervals beside their points; at most 80 rows, then it points to the csv."""
    columns = text_columns(table, SHOWN_ROWS)
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join(" --- " if is_text(table[column]) else " ---: " for column in columns) + "|")
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*columns.values(), strict=True)]
    if len(table) > SHOWN_ROWS:
        lines += ["", f"The first {SHOWN_ROWS} of {len(table)} rows; all of them are in {name or 'the'}.csv."]
    return "\n".join(lines) + "\n"


def text_columns(table: pd.DataFrame, rows: int) -> dict[str, list[str]]:
    """Columns of the first `rows` of `table` as text for reading: intervals beside their points, no empty notes."""
    shown = table.head(rows)
    ranged = [column for column in table if f"{column}_low" in table and f"{column}_high" in table]
    hidden = {f"{column}{end}" for column in ranged for end in ("_low", "_high")}
    if "note" in table and not table["note"].astype(bool).any():
        hidden.add("note")
    text = {}
    for column in (column for column in table if column not in hidden):
        if column in ranged:
            values = zip(shown[column], shown[f"{column}_low"], shown[f"{column}_high"], strict=True)
            text[column] = [interval(*value) for value in values]
        else:
            text[column] = [number(value) for value in shown[column]]
    return text


def number(value: object) -> str:
    """A number as a reader wants it: whole ones with separators, shares to 3 decimals; – for NaN and NA."""
    if isinstance(value, str | bool | np.bool_):
        return str(value)
    if isinstance(value, int | np.integer):
        return f"{value:,}"
    if value is pd.NA:
        return "–"
    size = abs(value)
    if np.isnan(size):
        return "–"
    if size and not 5e-4 <= size < 1e9:
        return f"{value:.2g}"
    return f"{value:,.{3 if size < 10 else 1 if size < 1000 else 0}f}"


def interval(value: float, low: float, high: float) -> str:
    """Point and interval, "0.84 [0.80, 0.87]"; the point alone where there is no interval."""
    return number(value) if np.isnan(low) or np.isnan(high) else f"{number(value)} [{number(low)}, {number(high)}]"


def by_model(
    frame: pd.DataFrame, labels: Mapping[str, str], apart: Collection[str] = ()
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Label and rows of each model, then of all models together.

    Parameters
    ----------
    frame : DataFrame
        With the column `model`.
    labels : model -> label, in the order to show them
    apart : models that all models together leave out (those trained here, which are evidence of nothing larger),
        unless there are no others
    """
    names = frame["model"].astype(str).to_numpy(object)
    for model, label in labels.items():
        yield label, frame[names == model]
    yield ALL_MODELS, frame[_together(names, apart)]


def _together(names: np.ndarray, apart: Collection[str]) -> np.ndarray:
    """Which rows count where all models are pooled."""
    kept = ~np.isin(names.astype(str), list(apart))
    return kept if kept.any() else ~kept


class _Run:
    """Derived instances, and the scopes (a model, its arms, all models) with their resamples."""

    def __init__(
        self,
        frame: pd.DataFrame,
        resamples: int,
        seed: int,
        labels: Mapping[str, str] | None,
        families: Sequence[Mapping[str, int]] | None,
        apart: Collection[str],
    ) -> None:
        names = sorted({str(name) for name in frame["model"]})
        labels = dict(labels or {})
        self.order = [name for name in labels if name in names] + [name for name in names if name not in labels]
        shown = [str(labels.get(name, name)) for name in self.order]
        if len({*shown, ALL_MODELS}) <= len(shown):
            raise InvalidInput(f"labels: expected distinct model labels other than {ALL_MODELS!r}, got {shown}")
        self.labels = dict(zip(self.order, shown, strict=True))
        self.budgets = sorted({int(s) for s in frame["s"]})
        self.reference = 8 if 8 in self.budgets else self.budgets[0]
        self.reference_note = "" if self.reference == 8 else " (s = 8 is not among the budgets.)"
        self.families = list(families or [])
        self.draws = (resamples, seed)
        # One category per distinct text, whatever kind of column it came in.
        plain = {
            name: pd.Categorical(frame[name].astype(str))
            for name in ("arm", "input", "best", "certificate")
            if name in frame
        }
        self.names = frame["model"].astype(str).to_numpy(object)
        self.frame = frame.drop(columns=["model"]).assign(**plain)
        self.scopes = {self.labels[name]: Scope(self.frame[self.names == name], *self.draws) for name in self.order}
        self.scopes[ALL_MODELS] = Scope(self.frame[_together(self.names, apart)], *self.draws)

    def models(self, pooled: bool = True) -> Iterator[tuple[str, Scope]]:
        """Each model's scope, and that of all models together."""
        for label, scope in self.scopes.items():
            if pooled or label != ALL_MODELS:
                yield label, scope

    def by_budget(self, pooled: bool = True, every: bool = False) -> Iterator[tuple[dict, Scope]]:
        """Each model × each budget, then all budgets; with the columns that name the rows of a table.

        With `every`, all models together are really all.
        """
        for label, scope in self.models(pooled):
            if every and label == ALL_MODELS:
                scope = Scope(self.frame, *self.draws)
            for s in [*self.budgets, ALL_BUDGETS]:
                part = scope if s == ALL_BUDGETS else scope.where(scope["s"] == s)
                if len(part):
                    yield {"model": label, "s": str(s), "inputs": part.inputs, "n": len(part)}, part

    def arms(self) -> Iterator[tuple[str, str, Scope]]:
        """Each model × arm, with resamples of that arm's inputs."""
        for name in self.order:
            rows = self.frame[self.names == name]
            for arm in sorted(set(rows["arm"])):
                yield self.labels[name], arm, Scope(rows[rows["arm"] == arm], *self.draws)


class Row(dict):
    """One row of a table: plain columns, and estimates as three columns each with their notes collected."""

    def __init__(self, **columns: object) -> None:
        super().__init__(columns)
        self.notes: list[str] = []

    def put(self, name: str, estimate: Estimate) -> None:
        self[name], self[f"{name}_low"], self[f"{name}_high"] = estimate.value, estimate.low, estimate.high
        if estimate.note.startswith("no interval"):
            self.notes.append(estimate.note)
        elif estimate.note:
            self.notes.append(f"{name}: {estimate.note}")

    def done(self) -> dict:
        return {**self, "note": "; ".join(dict.fromkeys(self.notes))}


def _ceiling(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget():
        for against, suffix in AGAINST.items():
            row = Row(**columns, against=against)
            row.put("c", part.median(part[f"c_{suffix}"]))
            above = part.where(part[f"kappa_{suffix}"] > FLAT)
            row["n_above"] = len(above)
            row.put("c_above", above.median(above[f"c_{suffix}"]))
            rows.append(row.done())
    return rows


def _kappa(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget():
        for against, suffix in AGAINST.items():
            kappa = part[f"kappa_{suffix}"]
            row = Row(**columns, against=against)
            for name, limit in (("within_1.11", FLAT), ("within_1.5", 1.5), ("within_2", 2.0)):
                row.put(name, part.share(kappa <= limit))
            row.put("above_1.11", part.share(kappa > FLAT))
            row.put("attained", part.share(part["attained" if suffix == "hat" else "attained_best"]))
            median, p90 = part.quantiles(kappa, [0.5, 0.9])
            row.put("median", median)
            row.put("p90", p90)
            inside = part.where(kappa <= 1.5)
            row["n_inside"] = len(inside)
            median, p90 = inside.quantiles(inside[f"kappa_{suffix}"], [0.5, 0.9])
            row.put("inside_median", median)
            row.put("inside_p90", p90)
            rows.append(row.done())
    return rows


def _recovered(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget():
        row = Row(**columns)
        for name, nothing in (
            ("recovered", "nothing_to_close"),
            ("recovered_first", "nothing_to_close_best"),
            ("recovered_second", "nothing_to_close_best"),
            ("recovered_either", "nothing_to_close_best"),
        ):
            if nothing not in row:
                row[nothing] = int(part[nothing].sum())
            quarter, median = part.quantiles(part[name], [0.25, 0.5])
            row.put(name, median)
            row.put(f"{name}_p25", quarter)
        rows.append(row.done())
    return rows


def _content_arms(run: _Run) -> Rows:
    rows = []
    for label, arm, scope in run.arms():
        for s in (ALL_BUDGETS, run.reference):
            part = scope if s == ALL_BUDGETS else scope.where(scope["s"] == s)
            for against, suffix in AGAINST.items():
                kappa = part[f"kappa_{suffix}"]
                row = Row(model=label, arm=arm, s=str(s), inputs=part.inputs, n=len(part), against=against)
                row.put("above_1.11", part.share(kappa > FLAT))
                row.put("auc", part.auc(part["dropped_mass"], kappa > FLAT))
                row.put("median", part.median(kappa))
                rows.append(row.done())
    return rows


def _prediction(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget(pooled=False):
        if columns["s"] == ALL_BUDGETS:
            continue
        mass = part["dropped_mass"]
        score = part.cell_medians(mass)
        for against, suffix in AGAINST.items():
            kappa = part[f"kappa_{suffix}"]
            row = Row(**columns, against=against)
            row.put("above_1.11", part.share(kappa > FLAT))
            row.put("auc", part.auc(mass, kappa > FLAT))
            row.put("spearman_mass", part.spearman(mass, kappa))
            row.put("spearman_phi", part.spearman(part["phi"], part[against]))
            flat = part.cell_medians(kappa) >= FLAT
            row["cells"], row["flat_cells"] = flat.shape[1], int(flat[0].sum())
            row.put("cell_auc", part.summarise(auc_by_resample(score, flat), "one class only"))
            for level in (25, 50, 75):
                row[f"dropped_mass_p{level}"] = float(np.percentile(mass, level))
            rows.append(row.done())
    return rows


def _predictors(run: _Run) -> Rows:
    """Every predictor of each model: all arms at each budget, each arm at the reference budget."""
    rows = []
    scopes = [(label, ALL_ARMS, scope, run.budgets) for label, scope in run.models(pooled=False)]
    scopes += [(label, arm, scope, [run.reference]) for label, arm, scope in run.arms()]
    order = list(run.labels.values())
    for label, arm, scope, budgets in sorted(scopes, key=lambda each: order.index(each[0])):
        for s in budgets:
            part = scope.where(scope["s"] == s)
            if not len(part):
                continue
            kappa = part["kappa_hat"]
            flat = part.cell_medians(kappa) >= FLAT
            for name in PREDICTORS:
                score = part[name]
                row = Row(model=label, arm=arm, s=str(s), predictor=name, inputs=part.inputs, n=len(part))
                row.put("auc", part.auc(score, kappa > FLAT))
                for column in ("es_max_mass", "es_pool", "kappa_hat"):
                    row.put(f"spearman_{column}", part.spearman(score, part[column]))
                row.put("cell_auc", part.summarise(auc_by_resample(part.cell_medians(score), flat), "one class only"))
                rows.append(row.done())
    return rows


def _edges(run: _Run) -> Rows:
    """Where the flat rows sit: the first and last eighth of a model's layers against those between."""
    rows = []
    for columns, part in run.by_budget(pooled=False):
        if columns["s"] == ALL_BUDGETS:
            continue
        layer = part["layer"].astype(np.int64)
        layers = int(layer.max()) + 1
        wide = max(1, round(layers / 8))
        edge, above = (layer < wide) | (layer >= layers - wide), part["kappa_hat"] > FLAT
        row = Row(**columns, layers=layers, edge_layers=min(2 * wide, layers))
        edges, interior = part.where(edge), part.where(~edge)
        for name, some in (("edge", edges), ("interior", interior)):
            row.put(name, some.share(some["kappa_hat"] > FLAT))

        def ratio(weights: np.ndarray, part: Scope = part, edge: np.ndarray = edge, above: np.ndarray = above):
            top, bottom = (weighted_share(above[rows], part.codes[rows], weights) for rows in (edge, ~edge))
            return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)

        row.put("ratio", part.estimate(ratio, "no row above 1.11 between the edges"))
        rows.append(row.done())
    return rows


def _cells(run: _Run) -> Rows:
    rows = []
    for label, scope in run.models(pooled=False):
        part = scope.where(scope["s"] == run.reference)
        for index in part.cells() if len(part) else []:
            cell = part.where(index)
            row = Row(model=label, s=str(run.reference), layer=int(cell["layer"][0]), head=int(cell["head"][0]))
            row["n"] = len(cell)
            for name in ("dropped_mass", "kappa_hat", "kappa_best"):
                row[name] = float(np.median(cell[name]))
            row["flat"], row["flat_best"] = row["kappa_hat"] >= FLAT, row["kappa_best"] >= FLAT
            row["above_1.11"] = float((cell["kappa_hat"] > FLAT).mean())
            row.put("auc", cell.auc(cell["dropped_mass"], cell["kappa_hat"] > FLAT))
            rows.append(row.done())
    return rows


def _certified(part: Scope) -> np.ndarray:
    """Which instances have a certificate."""
    return ~np.isnan(part["es_certified"]) if "es_certified" in part else np.zeros(len(part), bool)


def _certificates(run: _Run) -> Rows:
    rows = []
    for columns, whole in run.by_budget():
        known = "es_certified" in whole
        sampled = whole.where(_certified(whole))
        row = Row(model=columns["model"], s=columns["s"], inputs=columns["inputs"], sampled=len(sampled))
        outcome = sampled["certificate"] if known else np.array([], object)
        for name in ("optimal", "improved", "timeout"):
            row[name] = int((outcome == name).sum())
        for name in ("optimal", "improved", "timeout"):
            row.put(f"share_{name}", sampled.share(outcome == name))
        error, lower, ranks = (
            sampled[name] if known else np.array([])
            for name in ("es_certified", "certificate_lower", "certificate_max_rank")
        )
        proved = sampled["certificate_proved"].astype(bool) if known else np.array([], bool)
        beaten = error < sampled["es_pool"] * (1 - MATERIAL)
        row["proved"] = int(proved.sum())
        row.put("pool_proved", sampled.share(proved & ~beaten))
        row.put("pool_beaten", sampled.share(beaten))
        before = np.minimum.reduce(
            [sampled[f"es_{name}"] for name in ("max_mass", "pool", "balance", "balance_second", "balance_pool")]
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = (1 - error / before)[outcome == "improved"]
            gap = np.where(error == 0, 0.0, 1 - lower / error)
        row["gain_median"] = float(np.median(gain)) if gain.size else np.nan
        row["gain_max"] = float(gain.max()) if gain.size else np.nan
        row["gap_median"] = float(np.nanmedian(gap)) if (~np.isnan(gap)).any() else np.nan
        row["max_rank_median"] = float(np.nanmedian(ranks)) if (~np.isnan(ranks)).any() else np.nan
        if not len(sampled):
            row.notes = ["none sampled"]
        rows.append(row.done())
    return rows


def _pools(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget():
        row = Row(**columns)
        # Against all families, and against the mass pools alone.
        for error, prefix in (("es_pool", ""), ("es_mass_pool", "mass_pool_")):
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = np.where(part[error] == 0, 0.0, 1 - part["es_best"] / part[error])
            beats = gain > GAP
            row.put(f"{prefix}beaten", part.share(beats))
            median, p90 = part.where(beats).quantiles(gain[beats], [0.5, 0.9])
            row.put(f"{prefix}gain_median", median)
            row.put(f"{prefix}gain_p90", p90)
            if error == "es_pool":
                # Only a certified row has been looked at over all keys.
                sampled = _certified(part)
                row.put("certified_beaten", part.where(sampled).share(beats[sampled]))
        for name in ("pool", "balance", "balance_second", "certificate"):
            row[f"best_{name}"] = float((part["best"] == name).mean())
        row["subsets_median"] = float(np.median(part["pool_subsets"]))
        row["subsets_max"] = int(part["pool_subsets"].max())
        row["pool_keys_max"] = int(part["pool_keys"].max())
        row["pool_mass_median"] = float(np.median(part["mass_pool"]))
        row["complete"] = float(part["pool_complete"].mean())
        row["families"] = _family_text(run.families, columns["s"])
        # Nothing to average where nothing beats the families is no shortcoming.
        row.notes = [note for note in row.notes if not note.endswith("no rows")]
        rows.append(row.done())
    return rows


def _family_text(families: Sequence[Mapping[str, int]], s: str) -> str:
    """Which kept sets were enumerated at budget s, in words: "24 heaviest + any 8 of the next 24"."""
    words = []
    for family in families:
        if str(family["budget"]) != s:
            continue
        budget, pool = int(family["budget"]), int(family["pool"])
        core, free = int(family.get("core", 0)), int(family.get("free", 0))
        if free:
            words.append(f"balance's set with {free} keys chosen anew among {pool}")
        elif core:
            words.append(f"{core} heaviest + any {budget - core} of the next {pool - core}")
        else:
            words.append(f"any {budget} of {pool}")
    return " or ".join(words)


def _invariants(run: _Run) -> Rows:
    rows = []
    for columns, part in run.by_budget(every=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            capped = np.where(part["bound"] == 0, 0.0, part["es_max_mass"] / part["bound"])
            swaps = np.where(part["es_mass_pool"] == 0, 1.0, part["es_balance_pool"] / part["es_mass_pool"])
        rows.append(
            {
                **columns,
                "largest_error_over_bound": float(capped.max()),
                "least_kappa_hat": float(part["kappa_hat"].min()),
                "least_balance_over_pool": float(swaps.min()),
                "least_dropped_mass": float(part["dropped_mass"].min()),
                "largest_dropped_mass": float(part["dropped_mass"].max()),
                # A broken invariant stops the run before any table, so a table that exists counts none.
                "violations": 0,
            }
        )
    return rows


def _kappa_quantiles(run: _Run) -> Rows:
    levels = np.linspace(0, 1, 201)
    rows = []
    for columns, part in run.by_budget(pooled=False):
        if columns["s"] != ALL_BUDGETS:
            # Not numpy's linear form: between a finite and an infinite ratio it has no value.
            hat, best = (np.quantile(part[name], levels, method="inverted_cdf") for name in ("kappa_hat", "kappa_best"))
            rows += [
                {"model": columns["model"], "s": columns["s"], "level": level, "kappa_hat": h, "kappa_best": b}
                for level, h, b in zip(np.round(levels, 3), hat, best, strict=True)
            ]
    return rows


BUILDERS: dict[str, tuple[Callable[[_Run], Rows], str]] = {
    "ceiling": (
        _ceiling,
        "Selection ceiling: median share c of the max-mass-to-dense gap that another kept set of the same size "
        "closes, over all instances and over the n_above instances where kappa > {flat} (c_above).",
    ),
    "kappa": (
        _kappa,
        "How close max-mass comes: shares of instances with kappa = es(max-mass) / es(best) within 1.11, 1.5 and "
        "2, above 1.11, and where max-mass is itself the best set (attained); median and p90 of kappa, over all "
        "and inside kappa <= 1.5.",
    ),
    "recovered": (
        _recovered,
        "Share of the closable gap that the swap rule closes, median and p25, over instances with something to "
        "close: `recovered` over the mass pool's candidates against the exact minimum over them; `recovered_first`, "
        "`_second` (the two starts) and `_either` (the better of them) over all swap keys against es_best.",
    ),
    "content_arms": (
        _content_arms,
        "Content arms, all budgets pooled and s = {s}: share of instances with kappa > {flat}, AUC of the dropped "
        "mass for it, median kappa.",
    ),
    "prediction": (
        _prediction,
        "What the dropped mass tells: AUC for kappa > {flat}, Spearman with kappa, Spearman of Phi with the "
        "best error, and AUC of a cell's median dropped mass for flat cells (median kappa >= {flat}).",
    ),
    "predictors": (
        _predictors,
        "What may tell a row in advance: AUC for kappa-hat > {flat}, Spearman with max-mass's error, the pool's and "
        "kappa-hat, and AUC of a cell's median for flat cells. phi is Phi; spectral the participation ratio of the "
        "values' covariance, O(N d^2); absolute_bound is AdaKV's, 2 max ||v|| m. Each arm alone at s = {s}.",
    ),
    "edges": (
        _edges,
        "Where the flat rows sit: share of instances with kappa-hat > {flat} in the first and last eighth of the "
        "layers (edge), in those between (interior), and their ratio.",
    ),
    "cells": (
        _cells,
        "Every (layer, head) cell at s = {s}: median dropped mass, median kappa, flat where that median is >= {flat}; "
        "share of its instances with kappa-hat > {flat} and AUC of the dropped mass for it inside the cell.",
    ),
    "certificates": (
        _certificates,
        "Certificates over ALL keys on a sample: outcomes against the best set known before; pool_proved and "
        "pool_beaten are shares where es_pool is proved best, and where a set at least 1e-6 better is known; gain "
        "over the error known before where improved; gap between the error and the proved lower bound.",
    ),
    "pools": (
        _pools,
        "How often the least error known is below that over the enumerated families (beaten) and over their mass pools "
        "alone (mass_pool_beaten), and the relative gain there; which method has the least error; how many kept sets "
        "were enumerated per instance. certified_beaten counts the rows with a certificate alone, which were searched "
        "over all keys.",
    ),
    "invariants": (
        _invariants,
        "Relations that hold on every instance, checked on all: Lemma 2.1 (error over bound <= 1), kappa-hat >= 1, "
        "balance >= the exact minimum over the same candidates.",
    ),
    "kappa_quantiles": (_kappa_quantiles, "Quantiles of kappa per model and budget: its distribution function."),
}


def _joined(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def is_text(column: pd.Series) -> bool:
    """Whether a column is text (or truth values) to a reader, not numbers."""
    return not (pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column))
