"""README.md's tables of an offline run, out of the run's own csv files.

Usage: python docs/readme_tables.py results/offline

Tables of the measurement show the released models; those trained here stand in the run's own tables.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from contourkv.benchmark.claims import POOLED
from contourkv.benchmark.methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, RECTANGULAR
from contourkv.statistics import read_table
from contourkv.statistics.summary import lines_table
from contourkv.statistics.tables import ALL_BUDGETS, ALL_MODELS, interval

MINE = METHODS["contour_kvzip"].label
BUDGET = 0.25
LENGTH = 1024
CLAIMS = ["exact", "weights", "native", "predictors", "edges", "bounds", "structured_cells", "audit", "loss"]
"""Tables whose claims stand in `claims`, in this order."""
TRAINED = "trained here"
"""In the label of a model that is left out."""


def percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.0f}%"


def number(value: float, digits: int) -> str:
    return "–" if np.isnan(value) else f"{value:.{digits}f}"


def bracket(row: pd.Series, name: str) -> str:
    return interval(row[name], row[f"{name}_low"], row[f"{name}_high"])


def points(row: pd.Series, name: str) -> str:
    return f"{row[name]:.1f} [{row[f'{name}_low']:.1f}, {row[f'{name}_high']:.1f}]"


def across(table: pd.DataFrame, budgets: list, cell) -> list[str]:
    """One cell a budget, – where the table has none."""
    rows = table.set_index("budget")
    return [cell(rows.loc[budget]) if budget in rows.index else "–" for budget in budgets]


def rows_at_budgets(run: Path) -> str:
    """Kappa-hat, c-hat, what balance recovers, the AUC and the certificates, by model and budget."""
    folder = run / "tables"
    parts = [
        read_table(folder / f"{name}.csv") for name in ("kappa", "ceiling", "recovered", "prediction", "certificates")
    ]
    key = ["model", "s"]
    parts = [part[part["against"] == "es_pool"] if "against" in part else part for part in parts]
    kappa, ceiling, recovered, prediction, certificates = (part.astype({"s": str}).set_index(key) for part in parts)
    lines = []
    for at in certificates.index:
        if ALL_MODELS in at or ALL_BUDGETS in at or TRAINED in at[0]:
            continue
        proved = certificates.loc[at]
        lines.append(
            [
                *at,
                bracket(kappa.loc[at], "median"),
                bracket(kappa.loc[at], "within_1.5"),
                bracket(kappa.loc[at], "attained"),
                bracket(ceiling.loc[at], "c"),
                number(recovered.loc[at, "recovered"], 2),
                bracket(prediction.loc[at], "auc"),
                f"{proved['sampled']}, {proved['proved']}, {proved['improved']}",
            ]
        )
    header = [
        *("model", "s", "median κ̂", "share κ̂ ≤ 1.5", "max-mass is the pool's best", "median ĉ"),
        *("balance recovers (median)", "AUC of dropped mass for κ̂ > 1.11", "rows certified, proved, improved"),
    ]
    return lines_table(header, lines)


def claims(run: Path) -> str:
    """The paper's claims about what is measured beside the instances: one line a claim, one column a model."""
    table = read_table(run / "paper.csv")
    table = table[table["table"].isin(CLAIMS)]
    table = table.sort_values("table", key=lambda names: names.map(CLAIMS.index), kind="stable")
    table = table[~table["where"].str.contains(TRAINED)]
    models = [where for where in dict.fromkeys(table["where"]) if where not in ("–", ALL_MODELS)]
    lines = []
    for (claim, paper), rows in table.groupby(["claim", "paper"], sort=False):
        rows = rows.set_index("where")
        cells = [bracket(rows.loc[name], "here") if name in rows.index else "–" for name in [*models, ALL_MODELS]]
        lines.append([claim, paper, *cells])
    return lines_table(["claim", "paper", *models, ALL_MODELS], lines)


def scores(folder: Path) -> str:
    """Bytes as published; then, at the enforced bytes, accuracy by budget and the loss of continuations in nats."""
    table = read_table(folder / "scores.csv")
    table = table[(table["visibility"] == AGNOSTIC) & (table["informative"] == "yes")]
    models, budgets = list(dict.fromkeys(table["model"])), sorted(set(table["budget"]) - {1.0})
    lines = []
    for method in METHODS.values():
        storage = ENFORCED if ENFORCED in method.storages else PUBLISHED
        line = [method.label]
        for model in models:
            own = table[(table["model"] == model) & (table["method"] == method.label)]
            at = own["budget"].isin([BUDGET, 1.0])
            line.append(percent(own.loc[at & (own["storage"] == PUBLISHED), "held_share"].mean()))
            own, at = own[own["storage"] == storage], at[own["storage"] == storage]
            means = own[own["measure"] == "accuracy"].groupby("budget", as_index=False)["score"].mean()
            if means["score"].isna().all():
                line.append("–")
            elif method.keeps == "all":
                line.append(f"{means['score'].iloc[0]:.2f}")
            else:
                line.append(" / ".join(across(means, budgets, lambda row: f"{row['score']:.2f}")))
            loss = -own.loc[at & own["task"].str.startswith("continuation"), "score"].mean()
            line.append(number(loss, 2))
        lines.append(line)
    header, at = ["method"], " / ".join(f"{100 * budget:.0f}" for budget in budgets)
    for model in models:
        header += [f"{model}: published at {percent(BUDGET)} holds", f"accuracy at {at}%", f"loss at {percent(BUDGET)}"]
    return lines_table(header, lines)


def comparisons(folder: Path) -> str:
    """Wins, losses and ties of ContourKV over KVzip's scores, and of every ContourKV against KVzip."""
    table = read_table(folder / "comparison_counts.csv")
    table = table[table["model"] == ALL_MODELS]
    pairs = [(MINE, peer) for peer in dict.fromkeys(table["peer"])]
    compactor = METHODS["contour_compactor"].label
    pairs += [(compactor, METHODS["compactor"].label)]
    pairs += [(method.label, METHODS["kvzip"].label) for method in METHODS.values() if method.keeps == "ragged"][1:]
    lines = []
    for method, peer in pairs:
        rows = table[(table["method"] == method) & (table["peer"] == peer)].set_index("peer_storage")
        line, shares, mine = [method, peer], {}, "–"
        for storage in (PUBLISHED, ENFORCED, RECTANGULAR):
            if storage not in rows.index:
                line.append("–")
                continue
            row = rows.loc[storage]
            counts, kept = (
                " / ".join(str(int(row[f"{prefix}{name}"])) for name in ("wins", "losses", "ties"))
                for prefix in ("", "holm_")
            )
            line.append(f"{counts} ({kept})")
            shares[storage] = percent(row["peer_held_share"])
            mine = percent(row["held_share"])
        lines.append([*line[:2], mine, shares.get(PUBLISHED, "–"), *line[2:]])
    header = ["method", "peer", "it holds", "published peer holds", "against the peer as published", "enforced"]
    return lines_table([*header, "rectangular"], lines)


def enforcing(folder: Path) -> str:
    """Points lost by enforcing, ragged and rectangular."""
    table = read_table(folder / "enforcing.csv")
    table = table[(table["task"] == POOLED) & (table["visibility"] == AGNOSTIC)]
    budgets = sorted(set(table["budget"]))
    lines = [
        [model, method, storage, *across(rows, budgets, lambda row: points(row, "lost"))]
        for (model, method, storage), rows in table.groupby(["model", "method", "storage"], sort=False)
        if rows["lost"].notna().any()
    ]
    return lines_table(["model", "selection", "storage", *(f"at {percent(b)}" for b in budgets)], lines)


def visibility(folder: Path) -> str:
    """Points gained by seeing the question, at the enforced bytes."""
    table = read_table(folder / "visibility.csv")
    table = table[(table["task"] == POOLED) & (table["storage"] == ENFORCED)]
    budgets = sorted(set(table["budget"]))
    lines = [
        [model, method, *across(rows, budgets, lambda row: points(row, "gained"))]
        for (model, method), rows in table.groupby(["model", "method"], sort=False)
        if rows["gained"].notna().any()
    ]
    return lines_table(["model", "method", *(f"at {percent(b)}" for b in budgets)], lines)


def memory(folder: Path) -> str:
    """Bytes, seconds and tokens a second of each method at one length and budget."""
    table = read_table(folder / "memory.csv")
    table = table[(table["length"] == LENGTH) & (table["visibility"] == AGNOSTIC) & table["budget"].isin([BUDGET, 1])]
    models = list(dict.fromkeys(table["model"]))
    lines = []
    for method in METHODS.values():
        for storage in method.storages:
            if storage == RECTANGULAR or (storage == ENFORCED and method.keeps == "equal"):
                continue
            rows = table[(table["method"] == method.label) & (table["storage"] == storage)].set_index("model")
            line = [method.label, storage]
            for model in models:
                row = rows.loc[model]
                line += [
                    number(row["held_bytes"] / 2**20, 1),
                    number(row["held_over_nominal"], 2),
                    percent(row["peak_share"]),
                    number(row["compress_seconds"], 2),
                    number(row["tokens_per_s"], 1),
                ]
            lines.append(line)
    columns = ["held, MiB", "of nominal", "peak, of full", "compress, s", "tokens/s"]
    header = ["method", "storage"]
    for model in models:
        header += [f"{model}: {columns[0]}", *columns[1:]]
    return lines_table(header, lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    run = Path(sys.argv[1])
    parts = {run: [rows_at_budgets, claims], run / "benchmark": [scores, comparisons, enforcing, visibility, memory]}
    made = [folder for folder in parts if (folder / "tables").is_dir() or (folder / "scores.csv").is_file()]
    if not made:
        sys.exit(f"{run}: no tables of a run there; expected a folder such as results/offline")
    for folder, tables in parts.items():
        if folder not in made:
            print(f"{folder}: not made yet\n")
            continue
        for part in tables:
            print(f"{part.__doc__}\n\n{part(folder)}")
