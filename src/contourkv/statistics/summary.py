"""summary.md: what the paper claims beside what this run measured, claim by claim, with a verdict."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..provenance import write_text
from .tables import ALL_BUDGETS, ALL_MODELS, number, provenance_line
from .tables import interval as interval_text

INSIDE, OUTSIDE, ABSENT = "inside", "outside", "not measured here"
HOW_TO_READ = (
    f'"{INSIDE}" and "{OUTSIDE}" are about the point (about the interval where the claim is): the paper\'s band, '
    "taken to half a unit of its last printed digit. The last column says how the interval lies to that band. "
    "kappa-hat = error of the heaviest keys / least error over the enumerated kept sets; c-hat = 1 - 1/kappa-hat, "
    "the share of the error that a better choice of keys would remove. All models together means all their "
    "instances, each counting once."
)
"""What the verdicts and symbols of a summary mean."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper about a number that a table holds.

    Attributes
    ----------
    text : str
        The claim in words, with its section.
    low, high : float
        The paper's band, as printed there.
    digits : int
        Decimals printed there: the band counts as reaching half a unit of the last one further out.
    table, column : str
        Where the number is.
    where : mapping
        Columns of the table that pick the rows, besides the model.
    pooled : bool
        The claim is about all models together; else one line a model (and arm).
    count : str
        The table's column that counts the instances behind the number.
    whole : bool
        The interval, not the point, must lie in the band.
    arm : str
        The claim is that this arm has the largest value of all arms, inside the band.
    """

    text: str
    low: float
    high: float
    digits: int
    table: str
    column: str
    where: Mapping[str, str]
    pooled: bool = False
    count: str = "n"
    whole: bool = False
    arm: str = ""

    @property
    def band(self) -> tuple[float, float]:
        half = 0.5 * 10**-self.digits
        # The limits 0 and 1 of a share are no printed figures: nothing rounds across them.
        return (self.low - half if self.low > 0 else self.low, self.high + half if self.high != 1 else self.high)

    @property
    def printed(self) -> str:
        low, high = (f"{limit:.{self.digits}f}" for limit in (self.low, self.high))
        if self.arm:
            return f"the largest, up to {high}"
        if self.whole:
            return f"within {low} to {high}"
        if math.isinf(self.high):
            return f"above {low}"
        if self.high == 1 and self.low < 1 and self.column.startswith("within"):
            return f"above {low}"
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class Section:
    """Claims that belong together, why a difference from the paper may be real, and what to list by budget."""

    title: str
    why: str
    claims: Sequence[Claim]
    by_budget: Sequence[tuple[str, str]] = ()


POOL = {"against": "es_pool"}
EVERY = {**POOL, "s": ALL_BUDGETS}


def _at(s: int) -> dict[str, str]:
    return {**POOL, "s": str(s)}


def _whole(predictor: str) -> dict[str, str]:
    """A predictor over all arms at s = 8."""
    return {"arm": "all arms", "s": "8", "predictor": predictor}


SECTIONS = [
    Section(
        "Selection ceiling",
        "c-hat grows with the candidate family, which need not be the paper's, and with how flat a model's rows are; "
        "these are other texts, and unless the run is on the paper's models, smaller ones (135 to 270 million "
        "parameters where the paper's have 0.6 to 1.5 billion). A median outside the band need not be an error.",
        [
            Claim("Median c-hat, all budgets (section 2)", 0.021, 0.047, 3, "ceiling", "c", EVERY),
            Claim("Its 95% interval (section 2)", 0.017, 0.051, 3, "ceiling", "c", EVERY, whole=True),
            Claim(
                "Median c-hat where kappa-hat > 1.11 (section 2)",
                0.200,
                0.254,
                3,
                "ceiling",
                "c_above",
                EVERY,
                count="n_above",
            ),
        ],
        [("ceiling", "c")],
    ),
    Section(
        "How close max-mass comes",
        "How flat a model's heads are sets kappa, and how wide the candidate family is sets how much of it "
        "kappa-hat can see. Both differ from the paper's here (other and smaller models, other texts, another "
        "family), and the shares at s = 4 and 8 move with both.",
        [
            *(
                Claim(
                    f"Share with kappa-hat <= 1.5, s = {s} (section 2)",
                    0.89,
                    0.90,
                    2,
                    "kappa",
                    "within_1.5",
                    _at(s),
                    pooled=True,
                )
                for s in (4, 8)
            ),
            *(
                Claim(
                    f"Share with kappa-hat <= 2, s = {s} (section 2)",
                    0.97,
                    0.97,
                    2,
                    "kappa",
                    "within_2",
                    _at(s),
                    pooled=True,
                )
                for s in (4, 8)
            ),
            Claim(
                "Max-mass is the pool's best, s = 4 (section 2)",
                0.39,
                0.39,
                2,
                "kappa",
                "attained",
                _at(4),
                pooled=True,
            ),
            Claim(
                "Max-mass is the pool's best, s = 8 (section 2)",
                0.21,
                0.21,
                2,
                "kappa",
                "attained",
                _at(8),
                pooled=True,
            ),
            Claim("Share with kappa-hat <= 1.5, s = 4 (section 2)", 0.75, 0.95, 2, "kappa", "within_1.5", _at(4)),
            Claim("Share with kappa-hat <= 2, s = 4 (section 2)", 0.91, 1, 2, "kappa", "within_2", _at(4)),
            Claim(
                "Median kappa-hat inside <= 1.5, s = 4 (section 2)",
                1.00,
                1.03,
                2,
                "kappa",
                "inside_median",
                _at(4),
                count="n_inside",
            ),
            Claim(
                "p90 of kappa-hat inside <= 1.5, s = 4 (section 2)",
                1.14,
                1.28,
                2,
                "kappa",
                "inside_p90",
                _at(4),
                count="n_inside",
            ),
        ],
    ),
    Section(
        "Balance",
        "One-swaps stop where no single swap helps. A model with heads where one key carries a very large "
        "value can have more such dead ends than the paper's families; the quartiles in tables/recovered.md "
        "show them before the median does.",
        [
            Claim(
                f"Median share of the closable gap that balance recovers, s = {s} (section 2)",
                1.00,
                1.00,
                2,
                "recovered",
                "recovered",
                {"s": str(s)},
                count="closable",
            )
            for s in (4, 8, 16, 32)
        ],
    ),
    Section(
        "Prediction by dropped mass",
        "The ranking is a property of a model's heads: other architectures and sizes place and shape the flat heads "
        "differently, and few layers and heads leave few flat cells to rank. The paper's summary names no budget "
        "for the first and the last claim; s = 8 stands here, the others below and in the tables.",
        [
            Claim(
                "AUC of dropped mass for kappa-hat > 1.11, s = 8 (section 3)",
                0.76,
                0.89,
                2,
                "prediction",
                "auc",
                _at(8),
            ),
            Claim(
                "Cell-level AUC of median dropped mass, s = 8 (section 3)",
                0.82,
                0.94,
                2,
                "prediction",
                "cell_auc",
                _at(8),
                count="cells",
            ),
            Claim(
                "Spearman of Phi with ES_pool, s = 8 (section 3)", 0.80, 0.98, 2, "prediction", "spearman_phi", _at(8)
            ),
        ],
        [("prediction", "auc"), ("prediction", "spearman_phi")],
    ),
    Section(
        "Content arms",
        "The arms are other texts than the paper's, and fewer contexts of each; how a model meets a kind of text "
        "depends on what it was trained on.",
        [
            Claim("AUC in each arm, s = 8 (section 3)", 0.76, 0.89, 2, "content_arms", "auc", _at(8)),
            Claim(
                "Median kappa-hat of code among the arms, s = 8 (section 3, Table 2)",
                0,
                1.06,
                2,
                "content_arms",
                "median",
                _at(8),
                arm="code",
            ),
        ],
    ),
    Section(
        "Free weights",
        "ES and EF are minima over one pool of the heaviest keys, which need not be the paper's; pi grows with the "
        "pool. Where EF is an upper bound (column exact of tables/weights.md), pi is a lower one.",
        [
            *(
                Claim(f"Median price pi of forced weights, s = {s} (section 2)", at, at, 2, "weights", "pi", {"s": s})
                for s, at in (("4", 1.07), ("32", 1.79))
            ),
            *(
                Claim(f"p99 of the price pi, s = {s} (section 2)", at, at, 1, "weights", "pi_p99", {"s": s})
                for s, at in (("4", 2.2), ("32", 6.8))
            ),
            *(
                Claim(
                    f"Error of the geometric selection over max-mass's, s = {s}: worse (section 2, Table 8)",
                    1.0,
                    math.inf,
                    2,
                    "weights",
                    "geometric_over_max_mass",
                    {"s": s},
                )
                for s in ("4", "8", "16", "32")
            ),
        ],
    ),
    Section(
        "Exact kappa on short contexts",
        "The paper's share is of rows of all lengths that its solver ended on; here every row of short contexts is "
        "decided over all of its keys. A set that beats the pool's best can be made of light keys whose mean happens "
        "to lie near the dense output: an optimum that keeps a hundredth of the mass is one on paper only, and no "
        "reason to keep those keys. So kappa over all sets is an upper end; tables/exact.md has it under a floor on "
        "kept mass too, and that is the one to hold against the claim that max-mass is near-optimal.",
        [
            Claim(
                "A materially better set than the pool's over all keys, s = 4 (section 2)",
                0.049,
                0.049,
                3,
                "exact",
                "beaten",
                {"sets": "all"},
                pooled=True,
            ),
        ],
    ),
    Section(
        "Native budgets",
        "Contexts here are 1,024 tokens, the paper's longer ones: at s = 256 a quarter of the keys is kept here. The "
        "share that a swap rule can still close shrinks with what is left to choose.",
        [
            *(
                Claim(
                    f"Share of max-mass's error that balance closes, s = {s} (section 2, Table 1)",
                    0.04,
                    0.13,
                    2,
                    "native",
                    "closed",
                    {"s": str(s)},
                )
                for s in (64, 128, 256)
            ),
            *(
                Claim(
                    f"Cap 2 D m over its value at s = 8, s = {s} (section 2, Table 1)",
                    low,
                    high,
                    2,
                    "native",
                    "cap",
                    {"s": str(s)},
                )
                for s, low, high in ((64, 0.28, 0.34), (256, 0.08, 0.12))
            ),
            *(
                Claim(
                    f"Rows that balance improves by at least 10%, s = {s} (section 2, Table 1)",
                    0.21,
                    0.59,
                    2,
                    "native",
                    "improved",
                    {"s": str(s)},
                )
                for s in (64, 128, 256)
            ),
        ],
    ),
    Section(
        "Other predictors",
        "The paper names an O(N d^2) spectral statistic and a published absolute bound without formulas; here they are "
        "the participation ratio of the values' covariance and AdaKV's bound. At chance is read as 0.45 to 0.55.",
        [
            Claim(
                "AUC of the spectral statistic for kappa-hat > 1.11, s = 8: at chance (section 3)",
                0.45,
                0.55,
                2,
                "predictors",
                "auc",
                _whole("spectral"),
            ),
            Claim(
                "Spearman of the absolute bound with max-mass's error, s = 8 (section 3)",
                0.98,
                0.98,
                2,
                "predictors",
                "spearman_es_max_mass",
                _whole("absolute_bound"),
            ),
            Claim(
                "Spearman of the absolute bound with kappa-hat, s = 8 (section 3)",
                0.21,
                0.70,
                2,
                "predictors",
                "spearman_kappa_hat",
                _whole("absolute_bound"),
            ),
        ],
    ),
    Section(
        "Deployed methods on rows",
        "At s = 8 each method is scaled to a budget that it was not made for (windows, pages and sinks of a few keys), "
        "and how is this project's reading; the paper's own scaling is not in its summary. Excess errors are ranked in "
        "units of D here.",
        [
            *(
                Claim(
                    f"Median error of {method} over the pool's best, s = 8 (section 4)",
                    low,
                    high,
                    2 if method == "max-mass" else 1,
                    "audit",
                    "over_pool",
                    {"s": "8", "method": method},
                )
                for method, low, high in (
                    ("SnapKV", 1.4, 2.1),
                    ("H2O", 1.4, 2.1),
                    ("Quest", 1.4, 2.1),
                    ("StreamingLLM", 1.4, 2.1),
                    ("max-mass", 1.02, 1.03),
                )
            ),
            *(
                Claim(
                    f"Median error of SnapKV over max-mass, s = {s} (section 4)",
                    1.8,
                    2.2,
                    1,
                    "audit",
                    "over_max_mass",
                    {"s": str(s), "method": "SnapKV"},
                )
                for s in (64, 128, 256)
            ),
            *(
                Claim(
                    f"Spearman of dropped mass with {method}'s excess error, s = 8 (section 4)",
                    0.70,
                    0.84,
                    2,
                    "audit",
                    "spearman",
                    {"s": "8", "method": method},
                )
                for method in ("SnapKV", "H2O", "Quest", "StreamingLLM")
            ),
        ],
    ),
    Section(
        "Loss in the forward pass",
        "Held-out continuations of other texts, and smaller models; which cells are flat is decided on the run's own "
        "contexts, which the losses are not measured on.",
        [
            Claim(
                "Loss of balance on the flat cells alone minus all max-mass, nats a token, s = 8: below 0 (section 4)",
                -0.243,
                -0.122,
                3,
                "loss",
                "minus_max_mass",
                {"arm": "all arms", "s": "8", "variant": "flat_balance"},
                count="tokens",
            ),
        ],
    ),
    Section(
        "Task-structured contexts",
        "Few contexts, and models that answer only some of these tasks; the bounds themselves, registered before the "
        "capture, are judged in tables/bounds.md.",
        [
            Claim(
                "On structured contexts, pooled c-hat (section 3)",
                0.016,
                0.042,
                3,
                "bounds",
                "value",
                {"bound": "pooled_c_hat"},
                True,
            ),
            Claim(
                "p90 margin ratio, retrieval over background (section 3)",
                0.83,
                0.97,
                2,
                "bounds",
                "value",
                {"bound": "margin_ratio_p90"},
                True,
            ),
            Claim(
                "Retrieval rows that need value-aware selection, s = 8 (section 3)",
                0.0187,
                0.0187,
                4,
                "bounds",
                "value",
                {"bound": "value_aware_share"},
                True,
            ),
            Claim(
                "On structured contexts, AUC of dropped mass for kappa-hat > 1.11 (section 3)",
                0.75,
                0.80,
                2,
                "bounds",
                "value",
                {"bound": "auc"},
                True,
            ),
            Claim(
                "Flat labels agree with the generic contexts (section 3)",
                0.90,
                0.93,
                2,
                "structured_cells",
                "agreement",
                {"arm": "all arms"},
                count="cells",
            ),
            Claim(
                "Rank correlation of cells with the generic contexts (section 3)",
                0.94,
                0.97,
                2,
                "structured_cells",
                "spearman_dropped_mass",
                {"arm": "all arms"},
                count="cells",
            ),
        ],
    ),
    Section(
        "Certificates over all keys",
        "The paper's share is of the instances it solved, with its own solver, sizes and time limit; with another "
        "time limit and another sample the share that ends in a proof differs, and a time-out says nothing.",
        [
            Claim(
                "ES_pool proved best over all keys (section 2)",
                0.37,
                0.37,
                2,
                "certificates",
                "pool_proved",
                {"s": ALL_BUDGETS},
                pooled=True,
                count="sampled",
            ),
            Claim(
                "A materially better set than ES_pool's found (section 2)",
                0.049,
                0.049,
                3,
                "certificates",
                "pool_beaten",
                {"s": ALL_BUDGETS},
                pooled=True,
                count="sampled",
            ),
        ],
    ),
]


def write_summary(
    path: str | os.PathLike, tables: Mapping[str, pd.DataFrame], metadata: dict, sections: Sequence[str] = ()
) -> Path:
    """Write `build_summary` under `path`."""
    write_text(path, build_summary(tables, metadata, sections))
    return Path(path)


def build_summary(tables: Mapping[str, pd.DataFrame], metadata: dict, sections: Sequence[str] = ()) -> str:
    """The summary as markdown.

    Parameters
    ----------
    tables : as `build_tables` returns them or `read_tables` reads them
    metadata : dict
        Provenance, with `run` (name), `statistics` (resamples, seed) and, where some are, the labels of the models
        that were `trained` by this project.
    sections : sequence of str
        Further sections in markdown, after those of the measurement.

    Returns
    -------
    str
        The same bytes for the same tables and metadata: no date.
    """
    parts = [_header(tables, metadata)]
    for section in SECTIONS:
        lines = [line for claim in section.claims for line in judge(claim, tables)]
        parts.append(f"## {section.title}\n")
        parts.append(
            lines_table(
                ["claim", "where", "paper", "here [95%]", "instances", "inputs", "point", "interval"],
                lines,
            )
        )
        parts += [_by_budget(tables, *source) for source in section.by_budget]
        parts.append(f"Why a difference may be real: {section.why}\n")
    parts.append(_invariants(tables["invariants"]))
    parts += sections
    parts.append(f"Provenance: {provenance_line(metadata)}\n")
    return "\n".join(parts)


@dataclass(frozen=True)
class Judged:
    """What a run says of one claim, in one place.

    Attributes
    ----------
    claim : Claim
    where : str
        The model, or model and arm.
    said : str
        The measured number with its interval, or why there is none.
    value, low, high : float
        NaN where not measured.
    count, inputs : int
        Instances (or what `unit` says) and contexts behind it.
    unit : str
    verdict : str
        INSIDE, OUTSIDE or ABSENT.
    interval : str
        How the interval lies to the paper's band.
    """

    claim: Claim
    where: str
    said: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    count: int = 0
    inputs: int = 0
    unit: str = ""
    verdict: str = ABSENT
    interval: str = "none"

    @property
    def line(self) -> list[str]:
        """As the summary prints it: claim, where, paper, measured, instances, inputs, verdict, interval."""
        counts = [f"{self.count:,}{self.unit}", f"{self.inputs:,}"] if self.where != "–" else ["–", "–"]
        return [self.claim.text, self.where, self.claim.printed, self.said, *counts, self.verdict, self.interval]


def judged(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> list[Judged]:
    """A claim against every row of its table that it is about; one that says so where there is none."""
    found = []
    for where, row, others in _rows(claim, tables):
        value, low, high = (float(row[f"{claim.column}{end}"]) for end in ("", "_low", "_high"))
        count, unit = _count(row, claim)
        counts = {"count": count, "unit": unit, "inputs": int(row["inputs"])}
        known = not math.isnan(low) and not math.isnan(high)
        bottom, top = claim.band
        if math.isnan(value) or (claim.whole and not known):
            found.append(Judged(claim, where, _reason(str(row.get("note", "")), claim), **counts))
            continue
        inside = bottom <= low and high <= top if claim.whole else bottom <= value <= top
        said = interval_text(value, low, high)
        if claim.arm:
            larger = [f"{arm} {number(other)}" for arm, other in others if other > value]
            inside = inside and not larger
            said += f" (larger: {', '.join(larger)})" if larger else " (the largest)"
        overlap = overlap_text(low, high, bottom, top) if known else "none"
        verdict = INSIDE if inside else OUTSIDE
        found.append(Judged(claim, where, said, value, low, high, **counts, verdict=verdict, interval=overlap))
    return found or [Judged(claim, "–", "–")]


def judge(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> list[list[str]]:
    """Lines of the summary for one claim, see `Judged.line`."""
    return [each.line for each in judged(claim, tables)]


def _rows(claim: Claim, tables: Mapping[str, pd.DataFrame]) -> Iterator[tuple[str, pd.Series, list]]:
    """Rows of the table that a claim is about, how to name each, and the values of the model's other arms."""
    table = tables.get(claim.table)
    if table is None or len(table) == 0:
        return
    for name, wanted in claim.where.items():
        table = table[table[name] == wanted]
    table = table[(table["model"] == ALL_MODELS) == claim.pooled]
    for _, row in table.iterrows():
        if claim.arm and row["arm"] != claim.arm:
            continue
        where = f"{row['model']}, {row['arm']}" if row.get("arm", "all arms") != "all arms" else str(row["model"])
        others = table[table["model"] == row["model"]]
        yield where, row, list(zip(others["arm"], others[claim.column], strict=True)) if claim.arm else []


def _count(row: pd.Series, claim: Claim) -> tuple[int, str]:
    if claim.count == "closable":
        return int(row["n"] - row["nothing_to_close"]), ""
    return int(row[claim.count]), f" {claim.count}" if claim.count in ("cells", "tokens") else ""


def _reason(note: str, claim: Claim) -> str:
    """Why there is no figure: what the note says of this column, else of the whole row."""
    for start in (f"{claim.column}: ", "no interval", "none sampled"):
        for part in note.split("; "):
            if part.startswith(start):
                return part.removeprefix(f"{claim.column}: ")
    return "–"


def overlap_text(low: float, high: float, bottom: float, top: float) -> str:
    """How an interval lies to a band, in words."""
    if low > top:
        return "above the band"
    if high < bottom:
        return "below the band"
    return "within the band" if bottom <= low and high <= top else "overlaps the band"


def _by_budget(tables: Mapping[str, pd.DataFrame], name: str, column: str) -> str:
    table = tables[name]
    table = table[(table["against"] == "es_pool") & (table["model"] != ALL_MODELS)]
    words = []
    for model in dict.fromkeys(table["model"]):
        rows = table[table["model"] == model]
        values = ", ".join(
            f"{number(value)} ({'all budgets' if s == ALL_BUDGETS else f's = {s}'})"
            for s, value in zip(rows["s"], rows[column], strict=True)
        )
        words.append(f"{model} {values}")
    return f"By budget (column {column} of tables/{name}.md): {'; '.join(words)}.\n"


def _invariants(table: pd.DataFrame) -> str:
    row = table[(table["model"] == ALL_MODELS) & (table["s"] == ALL_BUDGETS)].iloc[0]
    broken = int(row["violations"])
    lines = [
        [
            "Lemma 2.1: es(A*_s) <= 2 D m_s on every instance (section 1)",
            "ratio at most 1",
            f"largest ratio {number(float(row['largest_error_over_bound']))}",
            f"{int(row['n']):,}",
            INSIDE if broken == 0 else OUTSIDE,
        ],
        [
            "kappa-hat >= 1 on every instance (section 1)",
            "at least 1",
            f"least {float(row['least_kappa_hat']):.12g}",
            f"{int(row['n']):,}",
            INSIDE if broken == 0 else OUTSIDE,
        ],
        [
            "Balance is never below the exact minimum over the same candidates",
            "ratio at least 1",
            f"least ratio {float(row['least_balance_over_pool']):.12g}",
            f"{int(row['n']):,}",
            INSIDE if broken == 0 else OUTSIDE,
        ],
    ]
    return (
        "## What must hold\n\n"
        + lines_table(["relation", "paper", "here", "instances", "verdict"], lines)
        + (
            "\nThese are theorems, checked on all instances before any table is made; rounding of 1e-9 is allowed. A "
            "difference here would be an error.\n"
        )
    )


def no_evidence(tables: Mapping[str, pd.DataFrame], metadata: dict) -> str:
    """What the models that were trained here stand for, and their part in the whole; "" where the run has none."""
    trained = metadata.get("trained")
    if not trained:
        return ""
    counts = tables["invariants"]
    counts = counts[counts["s"] == ALL_BUDGETS].set_index("model")["n"]
    own, every = int(counts.reindex(trained).sum()), int(counts[ALL_MODELS])
    apart = f", and all models together leave their {own:,} of the {every:,} instances out" if own < every else ""
    return (
        f"Trained by this project on its own texts: {'; '.join(trained)}. They show that the road through each "
        f"architecture works on learned attention; they are no evidence about large models{apart}"
    )


def _header(tables: Mapping[str, pd.DataFrame], metadata: dict) -> str:
    total = tables["invariants"]
    total = total[total["model"] == ALL_MODELS]
    whole = total[total["s"] == ALL_BUDGETS].iloc[0]
    arms = tables["content_arms"]
    sizes = {arm: sorted(set(rows["inputs"])) for arm, rows in arms.groupby("arm", sort=True)}
    counts = ", ".join(f"{arm} {' or '.join(map(str, some))}" for arm, some in sizes.items())
    fewest = min(min(some) for some in sizes.values())
    draws = metadata["statistics"]
    models = ", ".join(dict.fromkeys(arms["model"]))
    budgets = ", ".join(s for s in total["s"] if s != ALL_BUDGETS)
    revisions = [
        f"{model.get('name')} at {model['revision']}" for model in metadata.get("models", []) if model.get("revision")
    ]
    seeds = ", ".join(f"{name} {seed}" for name, seed in (metadata.get("seeds") or {}).items())
    if fewest < 2:
        width = "An arm with one input has no spread to resample, so figures over it stand without an interval."
    else:
        narrow = 1 - math.sqrt((fewest - 1) / fewest)
        width = (
            f"With {fewest} inputs in the smallest arm, such intervals come out about {100 * narrow:.0f}% too narrow."
        )
    lines = [
        f"# Run {metadata.get('run', '')}: the paper's claims beside what was measured here".replace("Run :", "Run:"),
        "",
        'Paper: "Trust the Mass: Forced Weights in KV-Cache Eviction", arXiv 2608.25230.',
        "",
        f"- Models: {models}",
        *([f"- {trained}"] if (trained := no_evidence(tables, metadata)) else []),
        *([f"- Revisions: {'; '.join(revisions)}"] if revisions else []),
        f"- Inputs (contexts) in each model: {counts}",
        f"- Instances (one attention row at one budget): {int(whole['n']):,}; budgets s = {budgets}",
        f"- Versions: {provenance_line({**metadata, 'seeds': {}, 'statistics': {}, 'models': []})}",
        f"- Seeds: {seeds + ', ' if seeds else ''}bootstrap {draws['seed']}",
        "",
        f"An interval is the 95% percentile interval of {draws['resamples']:,} resamples of the inputs within each "
        f"arm. {width}",
        "",
        HOW_TO_READ,
        "",
    ]
    return "\n".join(lines)


def lines_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lines of text as a markdown table."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows) + "\n"
