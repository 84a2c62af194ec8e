"""The figures of a run, each drawn from the csv tables; the only place that uses matplotlib.

Each `draw_<name>` takes tables and returns a Figure; `draw` reads the tables and writes pdf and png. Colours are
told apart by colour-blind readers, and lines also by marker and dash, so that a grey print reads. The same
tables give the same bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from .errors import InvalidInput
from .provenance import atomic_path
from .statistics.ratios import FLAT
from .statistics.tables import ALL_BUDGETS, ALL_MODELS, provenance_line, read_table

DPI = 200
# Okabe and Ito's palette, without its yellow, which is too pale for lines on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*"]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1))]
GREY = "#555555"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "hatch.linewidth": 0.7,
}


def draw_recovered(table: pd.DataFrame) -> Figure:
    """Fig. 1: share of the closable gap that balance recovers, by model and budget.

    Parameters
    ----------
    table : DataFrame
        The table `recovered`. Above: the median with its 95% interval (filled) and the lower quartile (open).
        Below: the share of instances with nothing to close, which are not among those above.
    """
    table = _single(table)
    models, budgets = _models(table), _budgets(table)
    with matplotlib.rc_context(STYLE):
        figure = _figure(_width(models, budgets), 4.4)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1])
        for number, model in enumerate(models):
            rows, at, width = _places(table, model, models, budgets)
            top.vlines(at, rows["recovered_p25"], rows["recovered"], color=_look(number)[0], lw=0.8, alpha=0.5)
            _points(top, at, rows, "recovered_p25", number, filled=False)
            _points(top, at, rows, "recovered", number)
            none = rows["nothing_to_close"] / rows["n"]
            bottom.bar(at, none, min(0.4, 0.85 * width), label=model, **_fill(number))
        low = np.nanmin([0.0, *table["recovered_p25"], *table["recovered_low"]])
        top.set_ylim(1.2 * low, 1.08)
        top.set_ylabel("share of the closable gap\nthat balance recovers")
        bottom.set_ylim(0, 1)
        bottom.yaxis.set_major_formatter(FuncFormatter(_percent))
        bottom.set_ylabel("instances with\nnothing to close")
        _budget_axis(bottom, budgets)
        top.grid(False, axis="x")
        figure.align_ylabels()
        more = [
            Line2D([], [], ls="", marker="o", color=GREY, ms=5, label="median [95%]"),
            Line2D([], [], ls="", marker="o", mfc="white", mec=GREY, ms=5, label="lower quartile [95%]"),
        ]
        _legend(figure, _model_keys(models, line=False) + more)
    return figure


def draw_cells(table: pd.DataFrame) -> Figure:
    """Fig. 2: layer × head maps of the median dropped mass and the median kappa-hat, side by side per model.

    Parameters
    ----------
    table : DataFrame
        The table `cells`, one budget. Flat cells (median kappa-hat >= 1.11) are outlined in both maps.
    """
    models, s = _models(table), table["s"].iloc[0]
    grids = [_grid(table[table["model"] == model]) for model in models]
    most = max(0.1, math.ceil(10 * max(float(np.nanmax(grid["dropped_mass"])) for grid in grids)) / 10)
    ratios = np.concatenate([grid["kappa_hat"].ravel() for grid in grids])
    ratios = ratios[np.isfinite(ratios)]
    # A few cells with a huge ratio would leave all others in one colour.
    top = float(np.clip(np.quantile(ratios, 0.97), 1.2, 3)) if ratios.size else 1.2

    columns = min(len(models), 3 if len(models) in (3, 5, 6, 9) else 4)
    lines = [grids[start : start + columns] for start in range(0, len(grids), columns)]
    talls = [[min(4.6, max(1.1, 0.11 * len(grid["flat"]))) for grid in line] for line in lines]
    heights = [max(line) for line in talls]
    # Inches: margins and maps of one model, then the strip of the two colour bars below.
    left, wide, between, right, above, below, strip = 0.62, 1.45, 0.14, 0.2, 0.5, 0.5, 0.95
    block = left + 2 * wide + between + right
    width, height = columns * block, sum(heights) + len(lines) * (above + below) + strip
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = _figure(width, height, layout=None)

        def place(x: float, y: float, w: float, h: float) -> Axes:
            return figure.add_axes((x / width, y / height, w / width, h / height))

        base = height
        for line, sizes, highest in zip(lines, talls, heights, strict=True):
            upper = base - above
            for column, (grid, tall) in enumerate(zip(line, sizes, strict=True)):
                x, base = column * block + left, upper - tall
                first = place(x, base, wide, tall)
                second = place(x + wide + between, base, wide, tall)
                mass = _map(first, grid, "dropped_mass", "viridis", Normalize(0, most))
                # The root spreads the ratios near 1.11, where cells begin to be flat.
                ratio = _map(second, grid, "kappa_hat", "cividis", PowerNorm(0.5, 1, top))
                first.set_title(rf"$\bar m_{{{s}}}$", pad=4)
                second.set_title(rf"$\hat\kappa_{{{s}}}$", pad=4)
                first.set_ylabel("layer")
                second.tick_params(left=False, labelleft=False)
                figure.text(
                    (x + wide + between / 2) / width,
                    (base + tall + 0.24) / height,
                    grid["model"],
                    ha="center",
                    va="bottom",
                    fontweight="bold",
                )
            base = upper - highest - below
        bar = min(2.2, 0.36 * width)
        gap = (width - 2 * bar) / 3
        steps = [step for step in ((1, FLAT, 1.5, 2, 3) if top > 2 else (1, 1.05, FLAT, 1.25, 1.5, 2)) if step <= top]
        for number, (image, label, extend, ticks) in enumerate(
            [
                (mass, rf"median dropped mass $\bar m_{{{s}}}$", "neither", MaxNLocator(5, steps=[1, 2, 5, 10])),
                (ratio, rf"median ratio of errors $\hat\kappa_{{{s}}}$", "max", FixedLocator(steps)),
            ]
        ):
            axis = place(gap + number * (bar + gap), 0.74, bar, 0.13)
            figure.colorbar(image, cax=axis, orientation="horizontal", extend=extend)
            axis.xaxis.set_major_locator(ticks)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_xlabel(label, labelpad=2)
        axis.axvline(FLAT, color="black", lw=2.2)
        axis.axvline(FLAT, color="white", lw=0.9)
        figure.text(
            0.5,
            0.06 / height,
            rf"outlined: flat cells (median $\hat\kappa_{{{s}}} \geq {FLAT}$)",
            ha="center",
            va="bottom",
            fontsize=8.5,
        )
    return figure


def draw_kappa(table: pd.DataFrame) -> Figure:
    """Distribution functions of kappa-hat, one panel a budget, one line a model, kappa on a log axis.

    Parameters
    ----------
    table : DataFrame
        The table `kappa_quantiles`.
    """
    models, budgets = _models(table), _budgets(table)
    columns = min(4, len(budgets))
    lines = math.ceil(len(budgets) / columns)
    level = table["level"].to_numpy()
    finite = table["kappa_hat"].to_numpy()[(level <= 0.99) & np.isfinite(table["kappa_hat"])]
    last = float(np.clip(finite.max(initial=2.2), 2.2, 20))
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(4.2, 2.3 * columns + 0.5), 2.5 * lines + 0.55)
        axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for place, (axis, s) in enumerate(zip(axes.ravel(), budgets, strict=False)):
            for limit in (FLAT, 1.5, 2.0):
                axis.axvline(limit, color="#AAAAAA", lw=0.9, zorder=0)
            for number, model in enumerate(models):
                rows = table[(table["model"] == model) & (table["s"] == s)]
                colour, _, dash = _look(number)
                axis.plot(rows["kappa_hat"], rows["level"], color=colour, ls=dash, lw=1.5, drawstyle="steps-post")
            axis.set_xscale("log")
            axis.set_xlim(1, last)
            axis.set_ylim(0, 1)
            ticks = [1, FLAT, 1.5, 2] + [tick for tick in (3, 5, 10, 20) if tick <= last]
            axis.xaxis.set_major_locator(FixedLocator(ticks))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.tick_params(axis="x", labelsize=7.5, labelrotation=45 if last > 3 else 0)
            axis.grid(False, axis="x")
            axis.yaxis.set_major_formatter(FuncFormatter(_percent))
            axis.set_title(f"s = {s}")
            if place + columns >= len(budgets):
                axis.tick_params(labelbottom=True)
        for axis in axes.ravel()[len(budgets) :]:
            axis.set_visible(False)
        figure.supxlabel(
            r"$\hat\kappa$ = error of the heaviest keys / least error over the enumerated sets", fontsize=9
        )
        figure.supylabel("instances at or below", fontsize=9)
        _legend(figure, _model_keys(models, marker=False))
    return figure


def draw_prediction(table: pd.DataFrame, arms: pd.DataFrame) -> Figure:
    """AUC of the dropped mass for kappa-hat > 1.11 with 95% intervals: by budget, and by content arm.

    Parameters
    ----------
    table : DataFrame
        The table `prediction`.
    arms : DataFrame
        The table `content_arms`; its one budget beside "all" is shown.
    """
    table = _single(table)
    table = table[table["against"] == "es_pool"]
    arms = arms[(arms["against"] == "es_pool") & (arms["s"] != ALL_BUDGETS)]
    models, budgets, kinds = _models(table), _budgets(table), sorted(set(arms["arm"]))
    left_width, right_width = _width(models, budgets) - 0.6, _width(models, kinds) - 0.6
    with matplotlib.rc_context(STYLE):
        figure = _figure(left_width + right_width + 0.4, 3.4)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[left_width, right_width])
        for number, model in enumerate(models):
            rows, at, _ = _places(table, model, models, budgets)
            _points(left, at, rows, "auc", number)
            rows, at, _ = _places(arms, model, models, kinds, "arm")
            _points(right, at, rows, "auc", number)
        for axis in (left, right):
            axis.axhline(0.5, color=GREY, lw=0.9, ls=(0, (4, 3)), zorder=0)
        left.annotate("chance", (0.01, 0.5), xycoords=("axes fraction", "data"), va="bottom", color=GREY, fontsize=8)
        known = [value for frame in (table, arms) for end in ("auc", "auc_low") for value in frame[end].dropna()]
        left.set_ylim(min([0.45, *(value - 0.03 for value in known)]), 1.02)
        left.set_ylabel(rf"AUC of $\bar m_s$ for $\hat\kappa > {FLAT}$ [95%]")
        _budget_axis(left, budgets)
        _category_axis(right, kinds, f"content arm (s = {arms['s'].iloc[0]})")
        left.set_title("by budget")
        right.set_title("by content arm")
        if table["auc"].isna().any() or arms["auc"].isna().any():
            right.annotate(
                "no point: one class only",
                (0.98, 0.02),
                xycoords="axes fraction",
                ha="right",
                va="bottom",
                fontsize=8,
                color=GREY,
            )
        _legend(figure, _model_keys(models, line=False))
    return figure


def draw_certificate(table: pd.DataFrame) -> Figure:
    """Outcomes of the certificate over all keys, by model and budget, with the sample size above each bar.

    Parameters
    ----------
    table : DataFrame
        The table `certificates`.
    """
    table = _single(table)
    models, budgets = _models(table), _budgets(table)
    outcomes = [("optimal", "#0072B2", ""), ("improved", "#E69F00", "///"), ("timeout", "#BBBBBB", "...")]
    columns = min(5, len(models))
    lines = math.ceil(len(models) / columns)
    wide = max(1.5, 0.45 * len(budgets) + 0.3)
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(4.2, wide * columns + 0.7), 2.5 * lines + 0.5)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, model in zip(axes.ravel(), models, strict=False):
            rows, _, _ = _places(table, model, models, budgets)
            at, base = np.arange(len(budgets)), np.zeros(len(budgets))
            for name, colour, hatch in outcomes:
                share = rows[f"share_{name}"].fillna(0).to_numpy()
                axis.bar(at, share, 0.72, bottom=base, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                base += share
            for place, count in zip(at, rows["sampled"].fillna(0), strict=True):
                axis.text(place, base[place] + 0.02, f"{int(count):,}", ha="center", va="bottom", fontsize=7.5)
            if not rows["sampled"].fillna(0).any():
                axis.text(np.mean(at), 0.5, "none sampled", ha="center", color=GREY)
            axis.set_title(model)
            axis.set_ylim(0, 1.1)
            axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
            axis.yaxis.set_major_formatter(FuncFormatter(_percent))
            axis.grid(False, axis="x")
            _budget_axis(axis, budgets)
        for axis in axes.ravel()[len(models) :]:
            axis.set_visible(False)
        figure.supylabel("sampled instances", fontsize=9)
        keys = [
            Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label)
            for (_, colour, hatch), label in zip(
                outcomes, ["none better: proved", "a better set found", "time-out"], strict=True
            )
        ]
        _legend(figure, keys)
    return figure


def draw_pools(table: pd.DataFrame) -> Figure:
    """How often less error is known than over the enumerated families, and how much less.

    Parameters
    ----------
    table : DataFrame
        The table `pools`. Left: share [95%] of the certified instances where something beats all families
        (filled), and of all instances where something beats the mass pools alone (open). Right: the relative gain
        over the mass pools there, median (filled) and p90 (open).
    """
    table = _single(table)
    models, budgets = _models(table), _budgets(table)
    wide = _width(models, budgets) - 0.5
    with matplotlib.rc_context(STYLE):
        figure = _figure(2 * wide + 0.6, 3.6)
        left, right = figure.subplots(1, 2)
        for number, model in enumerate(models):
            rows, at, _ = _places(table, model, models, budgets)
            _points(left, at, rows, "mass_pool_beaten", number, filled=False)
            _points(left, at, rows, "certified_beaten", number)
            _points(right, at, rows, "mass_pool_gain_p90", number, filled=False)
            _points(right, at, rows, "mass_pool_gain_median", number)
        left.set_title("filled: all families, certified rows\nopen: mass pools alone, all rows")
        left.set_ylabel("instances with less\nerror known [95%]")
        right.set_title("filled: median, open: p90")
        right.set_ylabel("gain over the mass pools\nwhere beaten [95%]")
        for axis in (left, right):
            top = max(0.02, axis.get_ylim()[1])
            axis.set_ylim(-0.03 * top, top)
            axis.yaxis.set_major_formatter(FuncFormatter(_percent))
            _budget_axis(axis, budgets)
        _legend(figure, _model_keys(models, line=False))
    return figure


FIGURES: dict[str, tuple[Callable[..., Figure], tuple[str, ...], str]] = {
    "fig1_recovered": (draw_recovered, ("recovered",), "Share of the closable gap that balance recovers"),
    "fig2_cells": (draw_cells, ("cells",), "Median dropped mass and median kappa-hat of every cell"),
    "fig_kappa": (draw_kappa, ("kappa_quantiles",), "Distribution of kappa-hat"),
    "fig_prediction": (draw_prediction, ("prediction", "content_arms"), "AUC of the dropped mass"),
    "fig_certificate": (draw_certificate, ("certificates",), "Certificates over all keys"),
    "fig_pools": (draw_pools, ("pools",), "How often less error is known than over the enumerated sets"),
}
"""Name of each figure: what draws it, from which tables, its title."""


def draw(name: str, tables: str | os.PathLike, stem: str | os.PathLike, metadata: Mapping | None = None) -> list[Path]:
    """Draw one figure from the csv tables and write <stem>.pdf and <stem>.png.

    Parameters
    ----------
    name : str
        One of `FIGURES`.
    tables : folder of the csv tables
    stem : path of the files without their endings
    metadata : dict, optional
        Provenance to store in the files; without it, that of the tables.

    Returns
    -------
    list of Path

    Raises
    ------
    InvalidInput
        An unknown name; a table that is missing or has no rows.
    """
    if name not in FIGURES:
        raise InvalidInput(f"figure {name!r}: expected one of {', '.join(FIGURES)}")
    function, sources, title = FIGURES[name]
    frames = []
    for source in sources:
        path = Path(tables) / f"{source}.csv"
        frames.append(read_table(path))
        if frames[-1].empty:
            raise InvalidInput(f"{path}: no rows to draw; run the rule `statistics` again")
    line = provenance_line(dict(metadata)) if metadata else str(frames[0].get("provenance", pd.Series([""])).iloc[0])
    return save(function(*frames), stem, {"Title": title, "Provenance": line})


def save(figure: Figure, stem: str | os.PathLike, metadata: Mapping[str, str]) -> list[Path]:
    """Write `figure` as <stem>.pdf and <stem>.png (200 dots an inch); no date goes into either.

    Parameters
    ----------
    figure : Figure
    stem : path without its ending
    metadata : dict
        `Title` and `Provenance`; the latter is the pdf's subject and the png's description.

    Returns
    -------
    list of Path
    """
    title, line = metadata.get("Title", ""), metadata.get("Provenance", "")
    kinds = {
        "pdf": {"Title": title, "Subject": line, "Creator": "contourkv", "CreationDate": None, "ModDate": None},
        "png": {"Title": title, "Description": line, "Software": None},
    }
    written = []
    for kind, entries in kinds.items():
        path = Path(f"{os.fspath(stem)}.{kind}")
        with atomic_path(path) as temporary, matplotlib.rc_context(STYLE):
            figure.savefig(temporary, format=kind, dpi=DPI, metadata=entries)
        written.append(path)
    return written


def _figure(width: float, height: float, layout: str | None = "constrained") -> Figure:
    # Without pyplot: no window system, no list of open figures.
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _percent(share: float, _: int | None = None) -> str:
    return f"{100 * share:.10g}%"


def _single(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["model"] != ALL_MODELS) & (table["s"] != ALL_BUDGETS)]


def _models(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["model"]))


def _budgets(table: pd.DataFrame) -> list[str]:
    return sorted(set(table["s"]), key=int)


def _look(number: int) -> tuple[str, str, object]:
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], DASHES[number % len(DASHES)]


def _fill(number: int) -> dict:
    hatch = ["", "////", "....", "xxxx", "----"][number % 5]
    return {"facecolor": COLOURS[number % len(COLOURS)], "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def _width(models: Sequence[str], categories: Sequence[str]) -> float:
    return max(4.4, 1.2 + len(categories) * max(0.8, 0.19 * len(models) + 0.25))


def _places(
    table: pd.DataFrame, model: str, models: Sequence[str], categories: Sequence[str], column: str = "s"
) -> tuple[pd.DataFrame, np.ndarray, float]:
    """A model's rows in the order of the categories, where they stand on the x axis, and the step between models."""
    rows = table[table["model"] == model].set_index(column).reindex(categories)
    step = 0.8 / len(models)
    shift = (list(models).index(model) - (len(models) - 1) / 2) * step
    return rows, np.arange(len(categories)) + shift, step


def _points(axis: Axes, at: np.ndarray, rows: pd.DataFrame, column: str, number: int, filled: bool = True) -> None:
    colour, marker, _ = _look(number)
    value, low, high = (rows[f"{column}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
    known = ~np.isnan(low) & ~np.isnan(high)
    axis.vlines(at[known], low[known], high[known], color=colour, lw=1.6)
    axis.plot(at, value, ls="", marker=marker, ms=4.5, color=colour, mfc=colour if filled else "white", zorder=3)


def _budget_axis(axis: Axes, budgets: Sequence[str]) -> None:
    _category_axis(axis, budgets, "budget s (keys kept)")


def _category_axis(axis: Axes, names: Sequence[str], label: str) -> None:
    axis.set_xticks(np.arange(len(names)), names)
    axis.set_xlim(-0.55, len(names) - 0.45)
    axis.grid(False, axis="x")
    axis.set_xlabel(label)


def _model_keys(models: Sequence[str], line: bool = True, marker: bool = True) -> list[Line2D]:
    keys = []
    for number, model in enumerate(models):
        colour, sign, dash = _look(number)
        keys.append(
            Line2D([], [], color=colour, ls=dash if line else "", marker=sign if marker else "", ms=5, label=model)
        )
    return keys


def _legend(figure: Figure, keys: Sequence[Line2D | Patch]) -> None:
    # As many columns as fit (a character is about 0.075 inches at this size); more lines make the figure taller.
    longest = max(len(key.get_label()) for key in keys)
    columns = max(1, min(len(keys), int(figure.get_figwidth() / (0.075 * longest + 0.5))))
    figure.set_figheight(figure.get_figheight() + 0.18 * (math.ceil(len(keys) / columns) - 1))
    figure.legend(handles=keys, loc="outside upper center", ncols=columns, handlelength=2.2, columnspacing=1.2)


def _grid(rows: pd.DataFrame) -> dict:
    """One model's cells as (layers, heads) arrays; NaN where a cell was not measured."""
    shape = (int(rows["layer"].max()) + 1, int(rows["head"].max()) + 1)
    grid: dict = {"model": rows["model"].iloc[0], "flat": np.zeros(shape, bool)}
    place = (rows["layer"].to_numpy(int), rows["head"].to_numpy(int))
    for name in ("dropped_mass", "kappa_hat"):
        grid[name] = np.full(shape, np.nan)
        grid[name][place] = rows[name]
    grid["flat"][place] = rows["flat"].astype(bool)
    return grid


def _map(axis: Axes, grid: dict, name: str, colours: str, scale: Normalize) -> AxesImage:
    cells = grid[name]
    image = axis.imshow(cells, cmap=colours, norm=scale, aspect="auto", interpolation="none")
    axis.set_facecolor("#EEEEEE")
    axis.set_xlabel("head")
    axis.spines[:].set_visible(False)
    for side, count, most in ((axis.xaxis, cells.shape[1], 7), (axis.yaxis, cells.shape[0], 8)):
        step = next(step for step in (1, 2, 5, 10, 20, 50) if count / step <= most)
        side.set_major_locator(FixedLocator(np.arange(0, count, step)))
    edges = _outline(grid["flat"])
    box = axis.get_position()
    inches = np.array([box.height, box.width]) * axis.figure.get_size_inches()[::-1]
    thick = float(np.clip(0.2 * 72 * (inches / cells.shape).min(), 0.6, 2.2))
    # Light on dark: one of the two shows on any colour below.
    for colour, width in (("black", thick), ("white", 0.4 * thick)):
        lines = LineCollection(edges, colors=colour, linewidths=width, capstyle="projecting", clip_on=False)
        axis.add_collection(lines, autolim=False)
    return image


def _outline(flat: np.ndarray) -> list[list[tuple[float, float]]]:
    """Border segments between flat cells and all others, in the axes of an image (x head, y layer)."""
    padded = np.pad(flat, 1)
    edges = []
    for y, x in zip(*np.nonzero(padded[:, 1:] != padded[:, :-1]), strict=True):
        edges.append([(x - 0.5, y - 1.5), (x - 0.5, y - 0.5)])
    for y, x in zip(*np.nonzero(padded[1:] != padded[:-1]), strict=True):
        edges.append([(x - 1.5, y - 0.5), (x - 0.5, y - 0.5)])
    return edges
