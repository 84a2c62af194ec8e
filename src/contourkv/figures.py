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

from .benchmark.claims import LEAST_LOST, MOST_LOST, POOLED, SEEN
from .benchmark.methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, QUERY_AWARE, RECTANGULAR, Method
from .errors import InvalidInput
from .provenance import atomic_path
from .statistics.ratios import FLAT
from .statistics.tables import ALL_ARMS, ALL_BUDGETS, ALL_MODELS, provenance_line, read_table

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
    names = {model: _heading(model, block) for model in models}
    above += 0.16 * max(name.count("\n") for name in names.values())
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
                    names[grid["model"]],
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
            axis.set_title(_heading(model, wide))
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


def draw_predictors(table: pd.DataFrame) -> Figure:
    """What tells a row in advance: AUC and rank correlations of each predictor at s = 8, one panel a measure.

    Parameters
    ----------
    table : DataFrame
        The table `predictors`; its rows over all arms at the reference budget.
    """
    reference = "8" if "8" in set(table["s"]) else _budgets(table)[0]
    table = table[(table["arm"] == ALL_ARMS) & (table["s"] == reference)]
    models, names = _models(table), list(dict.fromkeys(table["predictor"]))
    shown = {
        "dropped_mass": r"$\bar m_s$",
        "phi": r"$\Phi$",
        "spectral": "spectral",
        "absolute_bound": "AdaKV's\nbound",
    }
    panels = [
        ("auc", rf"AUC for $\hat\kappa > {FLAT}$", 0.5),
        ("spearman_kappa_hat", r"Spearman with $\hat\kappa$", 0.0),
        ("spearman_es_max_mass", "Spearman with max-mass's error", 0.0),
        ("spearman_es_pool", "Spearman with the pool's error", 0.0),
    ]
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(6.4, 1.2 + 2 * len(names) * max(0.75, 0.19 * len(models) + 0.25)), 5.6)
        axes = figure.subplots(2, 2, sharex=True).ravel()
        for axis, (column, label, nothing) in zip(axes, panels, strict=True):
            for number, model in enumerate(models):
                rows, at, _ = _places(table, model, models, names, "predictor")
                _points(axis, at, rows, column, number)
            axis.axhline(nothing, color=GREY, lw=0.9, ls=(0, (4, 3)), zorder=0)
            axis.set_ylabel(f"{label} [95%]")
            _category_axis(axis, [shown.get(name, name) for name in names], "")
        figure.align_ylabels()
        figure.supxlabel(f"predictor (s = {reference})", fontsize=9)
        _legend(figure, _model_keys(models, line=False))
    return figure


def draw_native(table: pd.DataFrame) -> Figure:
    """Native budgets: what balance closes, how many rows it improves, and Lemma 2.1's cap, by model and budget.

    Parameters
    ----------
    table : DataFrame
        The table `native`.
    """
    models, budgets = _models(table), _budgets(table)
    panels = [
        ("closed", "share of max-mass's error\nthat balance closes [95%]"),
        ("improved", "rows improved\nby at least 10% [95%]"),
        ("cap", r"cap $2D\bar m_s$ over its" + "\nvalue at s = 8 [95%]"),
    ]
    with matplotlib.rc_context(STYLE):
        figure = _figure(3 * (_width(models, budgets) - 1.2) + 0.6, 3.2)
        for axis, (column, label) in zip(figure.subplots(1, 3), panels, strict=True):
            for number, model in enumerate(models):
                rows, at, _ = _places(table, model, models, budgets)
                _points(axis, at, rows, column, number)
            axis.set_ylim(0, max(0.05, 1.08 * float(table[[column, f"{column}_high"]].max(axis=None))))
            axis.yaxis.set_major_formatter(FuncFormatter(_percent))
            axis.set_ylabel(label)
            _budget_axis(axis, budgets)
        _legend(figure, _model_keys(models, line=False))
    return figure


def draw_audit(table: pd.DataFrame) -> Figure:
    """Deployed methods on rows: median error over max-mass's by budget, one panel a model, one line a method.

    Parameters
    ----------
    table : DataFrame
        The table `audit`.
    """
    table = table[(table["model"] != ALL_MODELS) & (table["method"] != "max-mass")]
    models, budgets = _models(table), _budgets(table)
    methods = list(dict.fromkeys(table["method"]))
    columns = min(3, len(models))
    lines = math.ceil(len(models) / columns)
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(4.4, 2.9 * columns + 0.6), 2.8 * lines + 0.6)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, model in zip(axes.ravel(), models, strict=False):
            of_model = table[table["model"] == model]
            for number, method in enumerate(methods):
                rows = of_model[of_model["method"] == method].set_index("s").reindex(budgets)
                colour, marker, dash = _look(number)
                at = np.arange(len(budgets)) + (number - (len(methods) - 1) / 2) * 0.07
                axis.vlines(at, rows["over_max_mass_low"], rows["over_max_mass_high"], color=colour, lw=1.2)
                axis.plot(at, rows["over_max_mass"], color=colour, marker=marker, ls=dash, ms=4.5, lw=1.2)
            _ratio_axis(axis)
            axis.set_title(_heading(model, 2.9))
            _budget_axis(axis, budgets)
        for axis in axes.ravel()[len(models) :]:
            axis.set_visible(False)
        figure.supylabel("median error over max-mass's [95%] (log)", fontsize=9)
        _legend(figure, _model_keys(methods))
    return figure


def draw_loss(table: pd.DataFrame) -> Figure:
    """Nats that balance gains over max-mass in the model's own forward pass, by model and arm.

    Parameters
    ----------
    table : DataFrame
        The table `loss`. Filled: balance on the flat cells alone; open: balance on all cells. Dashed: what dense
        attention gains, the most that there is.
    """
    models, arms = _models(table), [*sorted(set(table["arm"]) - {ALL_ARMS}), ALL_ARMS]
    arms = [arm for arm in arms if arm in set(table["arm"])]
    variants = [("flat_balance", True), ("balance", False)]
    with matplotlib.rc_context(STYLE):
        figure = _figure(_width(models, arms) + 0.8, 3.4)
        axis = figure.subplots()
        for number, model in enumerate(models):
            for variant, filled in variants:
                rows, at, width = _places(table[table["variant"] == variant], model, models, arms, "arm")
                shift = -0.18 * width if filled else 0.18 * width
                _points(axis, at + shift, rows, "minus_max_mass", number, filled=filled)
            rows, at, width = _places(table[table["variant"] == "dense"], model, models, arms, "arm")
            axis.hlines(
                rows["minus_max_mass"], at - 0.4 * width, at + 0.4 * width, color=_look(number)[0], lw=1, ls=(0, (4, 2))
            )
        axis.axhline(0, color="black", lw=0.8, zorder=1)
        axis.set_ylabel("nats a token over all max-mass [95%]\n(below 0: less loss)")
        _category_axis(axis, arms, f"content arm (s = {table['s'].iloc[0]})")
        more = [
            Line2D([], [], ls="", marker="o", color=GREY, ms=5, label="balance on flat cells"),
            Line2D([], [], ls="", marker="o", mfc="white", mec=GREY, ms=5, label="balance on all cells"),
            Line2D([], [], ls=(0, (4, 2)), color=GREY, lw=1, label="dense"),
        ]
        _legend(figure, _model_keys(models, line=False) + more)
    return figure


def draw_weights(table: pd.DataFrame) -> Figure:
    """Free weights: their price by model and budget, and what a set chosen for them costs once renormalised.

    Parameters
    ----------
    table : DataFrame
        The table `weights`. Left: pi, median (filled) and p99 (open). Right: error of the geometric selection over
        max-mass's.
    """
    table = _single(table)
    models, budgets = _models(table), _budgets(table)
    wide = _width(models, budgets) - 0.6
    with matplotlib.rc_context(STYLE):
        figure = _figure(2 * wide + 0.6, 3.5)
        left, right = figure.subplots(1, 2)
        for number, model in enumerate(models):
            rows, at, _ = _places(table, model, models, budgets)
            _points(left, at, rows, "pi_p99", number, filled=False)
            _points(left, at, rows, "pi", number)
            _points(right, at, rows, "geometric_over_max_mass", number)
        left.set_title("filled: median, open: p99")
        left.set_ylabel(r"price of forced weights $\pi$ [95%] (log)")
        right.set_title("chosen for free weights, then renormalised")
        right.set_ylabel("median error\nover max-mass's [95%] (log)")
        for axis in (left, right):
            _ratio_axis(axis)
            _budget_axis(axis, budgets)
        _legend(figure, _model_keys(models, line=False))
    return figure


def draw_exact(table: pd.DataFrame) -> Figure:
    """Exact kappa over all keys, with and without a floor on kept mass, and how often the pool's best is beaten.

    Parameters
    ----------
    table : DataFrame
        The table `exact`. Left: kappa, median (filled) and p90 (open). Right: rows where a set better than the
        pool's best exists.
    """
    table = _single(table)
    models, among = _models(table), list(dict.fromkeys(table["sets"]))
    shown = {"all": "all sets", "floor": "sets that keep\nthe floor's mass"}
    wide = _width(models, among) - 0.8
    with matplotlib.rc_context(STYLE):
        figure = _figure(2 * wide + 0.6, 3.5)
        left, right = figure.subplots(1, 2)
        for number, model in enumerate(models):
            rows, at, _ = _places(table, model, models, among, "sets")
            _points(left, at, rows, "kappa_p90", number, filled=False)
            _points(left, at, rows, "kappa", number)
            _points(right, at, rows, "beaten", number)
        left.set_title("filled: median, open: p90")
        left.set_ylabel(r"exact $\kappa$ [95%] (log)")
        _ratio_axis(left)
        right.set_title("a better set than the pool's exists")
        right.set_ylabel("rows [95%]")
        right.set_ylim(-0.03, max(0.1, right.get_ylim()[1]))
        right.yaxis.set_major_formatter(FuncFormatter(_percent))
        for axis in (left, right):
            _category_axis(axis, [shown.get(name, name) for name in among], f"sets searched (s = {table['s'].iloc[0]})")
        _legend(figure, _model_keys(models, line=False))
    return figure


def draw_bounds(table: pd.DataFrame) -> Figure:
    """Registered bounds on structured contexts: each model's value beside the limit, a panel a bound.

    Parameters
    ----------
    table : DataFrame
        The table `bounds`. The shaded side breaks the bound.
    """
    # The models look as in the other figures, so all together come last.
    models = sorted(_models(table), key=lambda model: model == ALL_MODELS)
    bounds = list(dict.fromkeys(table["bound"]))
    shown = {
        "pooled_c_hat": r"median $\hat c$",
        "margin_ratio_p90": r"p90 of $\hat\kappa$, retrieval" + "\nover background rows",
        "value_aware_share": r"retrieval rows with $\hat\kappa > 2$" + "\nat s = 8",
        "auc": r"AUC of $\bar m_s$ for" + rf" $\hat\kappa > {FLAT}$",
    }
    columns = min(2, len(bounds))
    lines = math.ceil(len(bounds) / columns)
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(6.4, 2 * (1.2 + 0.3 * len(models))), 2.3 * lines + 0.6)
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for axis, bound in zip(axes, bounds, strict=False):
            rows = table[table["bound"] == bound]
            sign, limit = rows["limit"].iloc[0].split()
            for number, model in enumerate(models):
                _points(axis, np.array([number]), rows[rows["model"] == model], "value", number)
            bottom, top = axis.get_ylim()
            bottom, top = min(bottom, 0.9 * float(limit), 0), max(top, 1.15 * float(limit))
            broken = (float(limit), top) if sign == "<=" else (bottom, float(limit))
            axis.axhspan(*broken, facecolor="#DDDDDD", zorder=0)
            axis.axhline(float(limit), color="black", lw=0.9, zorder=1)
            axis.set_ylim(bottom, top)
            axis.set_ylabel(f"{shown.get(bound, bound)} [95%]")
            axis.set_title(f"{bound} {sign.replace('<=', '≤').replace('>=', '≥')} {limit}")
            axis.set_xticks([])
            axis.set_xlabel("models, as in the legend")
            axis.set_xlim(-0.6, len(models) - 0.4)
            axis.grid(False, axis="x")
        for axis in axes[len(bounds) :]:
            axis.set_visible(False)
        figure.align_ylabels()
        shade = Patch(facecolor="#DDDDDD", label="breaks the bound")
        _legend(figure, [*_model_keys(models, line=False), shade])
    return figure


# The downstream benchmark

MIB = 2**20
METHOD_MARKERS = {
    "contour_kvzip": "o",
    "contour_compactor": "s",
    "contour_snapkv": "^",
    "contour": "D",
    "kvzip": "P",
    "adakv_snapkv": "d",
    "adakv_expected_attention": "v",
    "tova": "<",
    "snapkv": ">",
    "h2o": "X",
    "streaming_llm": "p",
    "knorm": "*",
    "expected_attention": "h",
    "compactor": (4, 1, 0),
    "quest": "8",
    "random": (3, 1, 0),
}
"""One a method, in the order of the legend; colours tell families apart."""


def _method_looks() -> dict[str, tuple[str, object, object]]:
    """Colour, marker and dashes of each method, by label, in the order of the legend."""
    return {
        METHODS[name].label: (_family(METHODS[name]), marker, METHOD_DASHES.get(name, "-"))
        for name, marker in METHOD_MARKERS.items()
    }


METHOD_DASHES = {
    "contour_kvzip": "-",
    "contour_compactor": (0, (5, 1.2)),
    "contour_snapkv": (0, (2.2, 1)),
    "contour": (0, (5, 1, 1, 1)),
}
"""Of ContourKV's, which share a colour; the others' lines are solid."""


def _family(method: Method) -> str:
    """Colour of the methods that keep and rank alike."""
    if method.name == "random":
        return GREY
    if method.keeps == "equal":
        return "#009E73" if method.sees == QUERY_AWARE else "#E69F00"
    return {"ragged": "#0072B2", "heads": "#D55E00", "pages": "#CC79A7"}[method.keeps]


def draw_bytes_score(table: pd.DataFrame) -> Figure:
    """Score against the bytes really held, one panel a model and task, one line a method; agnostic.

    Parameters
    ----------
    table : DataFrame
        The benchmark's table `scores`. Filled markers, joined from budget to budget: enforced, with the 95% interval of
        ContourKV's; half-filled: a head-wise selection's scores in equal counts (rectangular). Open markers, the larger
        the larger the budget: as published. Dashed: the full cache; dotted: the accuracy of guessing.
    """
    table = table[table["score"].notna()] if "score" in table else table.iloc[:0]
    full = table[table["method"] == METHODS["full"].label]
    cut = table[(table["visibility"] == AGNOSTIC) & (table["method"] != METHODS["full"].label)]
    panels = list(dict.fromkeys(zip(table["model"], table["task"], strict=True)))
    if not panels:
        return _words("no cell was answered")
    looks = {label: look for label, look in _method_looks().items() if label in set(cut["method"])}
    ours = {method.label for method in METHODS.values() if method.keeps == "ragged"}
    columns = min(4 if len(panels) <= 16 else 6, len(panels))
    lines = math.ceil(len(panels) / columns)
    shares = cut["held_share"].to_numpy(float)
    least, most = max(0.01, float(shares.min(initial=0.9))), float(shares.max(initial=1.0))
    ticks = _budget_ticks(cut["budget"], 0.7 * least)
    sizes = dict(zip(sorted(set(cut["budget"])), np.linspace(4, 7, cut["budget"].nunique()), strict=True))
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(6.4, 2.5 * columns + 0.5), 2.5 * lines + 1.3)
        axes = figure.subplots(lines, columns, squeeze=False)
        for place, (axis, (model, task)) in enumerate(zip(axes.ravel(), panels, strict=False)):
            rows = cut[(cut["model"] == model) & (cut["task"] == task)]
            whole = full[(full["model"] == model) & (full["task"] == task)]
            either = pd.concat([whole, rows]).iloc[0]
            for label, (colour, marker, dashes) in looks.items():
                mine = rows[rows["method"] == label].sort_values("budget")
                thick = label in ours
                looked = {"color": colour, "marker": marker, "zorder": 4 if thick else 2.5}
                kept = mine[mine["storage"] == ENFORCED]
                line = {"lw": 2.0, "ms": 5} if thick else {"lw": 0.8, "ms": 4}
                axis.plot(kept["held_share"], kept["score"], ls=dashes, **line, **looked)
                if thick:
                    axis.vlines(
                        kept["held_share"], kept["score_low"], kept["score_high"], colour, lw=0.7, alpha=0.6, zorder=2.2
                    )
                equal = mine[mine["storage"] == RECTANGULAR]
                axis.plot(
                    equal["held_share"], equal["score"], lw=0.8, ls=":", ms=5, fillstyle="left", mew=0.6, **looked
                )
                loose = mine[mine["storage"] == PUBLISHED]
                for budget, share, score in zip(loose["budget"], loose["held_share"], loose["score"], strict=True):
                    axis.plot(share, score, ls="", ms=sizes[budget], mfc="none", mew=1, **looked)
            for level, dash in ((either["full"], (0, (5, 2))), (either["floor"], (0, (1, 1.5)))):
                if not np.isnan(level):
                    axis.axhline(level, color="black", lw=1, ls=dash, zorder=2)
            axis.set_xscale("log")
            axis.set_xlim(0.85 * least, 1.18 * most)
            axis.xaxis.set_major_locator(FixedLocator(ticks))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(FuncFormatter(_percent))
            nats = either["measure"] == "nats"
            if not nats:
                axis.set_ylim(-0.04, 1.06)
                axis.yaxis.set_major_formatter(FuncFormatter(_percent))
            if nats or place % columns == 0:
                axis.set_ylabel("minus nats per gold token" if nats else "accuracy")
            size = f"full {either['full_bytes'] / MIB:,.1f} MiB; {int(either['questions']):,} questions"
            unlike = ", uninformative" if either["informative"] == "no" else ""
            axis.set_title(f"{model}\n{task}{unlike}\n({size})", fontsize=8.5)
        for axis in axes.ravel()[len(panels) :]:
            axis.set_visible(False)
        figure.supxlabel("bytes held, share of the full cache (log)", fontsize=9)
        keys = [
            Line2D([], [], color=colour, marker=marker, ls=dashes, ms=5, lw=2 if label in ours else 0.8, label=label)
            for label, (colour, marker, dashes) in looks.items()
        ]
        keys += [
            Line2D([], [], color="black", marker="o", ms=4, lw=0.8, label="filled: enforced"),
            Line2D(
                [], [], color="black", marker="o", ms=5, lw=0.8, ls=":", fillstyle="left", label="half: equal counts"
            ),
            Line2D([], [], color="black", marker="o", ms=6.2, mfc="none", ls="", label="open: as published"),
            Line2D([], [], ls="", label="(larger: larger budget)"),
            Line2D([], [], color="black", lw=1, ls=(0, (5, 2)), label="full cache"),
            Line2D([], [], color="black", lw=1, ls=(0, (1, 1.5)), label="guessing"),
        ]
        _legend(figure, keys)
    return figure


def draw_comparisons(table: pd.DataFrame) -> Figure:
    """Wins, ties and losses of each ContourKV method against each peer, by the peer's storage, all models.

    Parameters
    ----------
    table : DataFrame
        The benchmark's table `comparison_counts`. Dark: what is left after Holm's correction. Beside each bar: wins and
        losses, raw.
    """
    table = table[table["model"] == ALL_MODELS]
    table = table[table["listed"] > 0]
    if table.empty:
        return _words("no comparison was made")
    methods = list(dict.fromkeys(table["method"]))
    bars = list(dict.fromkeys(zip(table["peer"], table["peer_storage"], strict=True)))
    places, at, last = [], 0.0, bars[0][0]
    for peer, _ in bars:
        # A little air between one peer's storages and the next peer.
        at += 0.0 if peer == last else 0.55
        places.append(at)
        at, last = at + 1, peer
    parts = [
        ("win, Holm too", "#0072B2", "", lambda row: row["holm_wins"]),
        ("win", "#9BD0F0", "////", lambda row: row["wins"] - row["holm_wins"]),
        ("tie", "#E4E4E4", "", lambda row: row["ties"]),
        ("loss", "#F7CF9B", "....", lambda row: row["losses"] - row["holm_losses"]),
        ("loss, Holm too", "#D55E00", "", lambda row: row["holm_losses"]),
    ]
    most = max(1, int(table["counted"].max()))
    with matplotlib.rc_context(STYLE):
        figure = _figure(2.6 + 1.75 * len(methods), 0.17 * at + 1.3)
        axes = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
        for axis, method in zip(axes, methods, strict=True):
            mine = table[table["method"] == method].set_index(["peer", "peer_storage"])
            for place, bar in zip(places, bars, strict=True):
                if bar not in mine.index:
                    continue
                row, base = mine.loc[bar], 0
                for _, colour, hatch, size in parts:
                    axis.barh(place, size(row), 0.86, base, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
                    base += size(row)
                words = f"{int(row['wins'])} : {int(row['losses'])}" if row["counted"] else "none counted"
                axis.text(base + 0.02 * most, place, words, va="center", fontsize=7)
            axis.set_title(method)
            axis.set_xlim(0, 1.3 * most)
            axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axis.grid(False, axis="y")
        axes[0].set_yticks(places, [f"{peer}, {storage}" for peer, storage in bars], fontsize=7.5)
        axes[0].set_ylim(places[-1] + 0.7, -0.7)
        figure.supxlabel("comparisons (beside the bars: wins : losses)", fontsize=9)
        _legend(
            figure,
            [Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name) for name, colour, hatch, _ in parts],
        )
    return figure


def draw_enforcing(table: pd.DataFrame) -> Figure:
    """Points lost when a head-wise selection is really cut to its nominal bytes, by budget, one panel a model.

    Parameters
    ----------
    table : DataFrame
        The benchmark's table `enforcing`; its rows over all informative accuracy tasks, agnostic. Filled: ragged
        storage; open: rectangular. Shaded: the paper's range.
    """
    table = table[(table["task"] == POOLED) & (table["visibility"] == AGNOSTIC) & table["lost"].notna()]
    if table.empty:
        return _words("no head-wise selection was scored both as published and enforced\non an informative task")
    series = [
        (label, storage)
        for label in dict.fromkeys(table["method"])
        for storage in (ENFORCED, RECTANGULAR)
        if ((table["method"] == label) & (table["storage"] == storage)).any()
    ]

    def rows_of(rows: pd.DataFrame, key: tuple[str, str]) -> pd.DataFrame:
        return rows[(rows["method"] == key[0]) & (rows["storage"] == key[1])]

    def band(axis: Axes) -> None:
        axis.axhspan(LEAST_LOST, MOST_LOST, color="#EEEEEE", zorder=0)
        axis.text(0.99, MOST_LOST - 1, "paper", transform=axis.get_yaxis_transform(), ha="right", va="top", color=GREY)

    labels = [f"{label}, {'ragged' if storage == ENFORCED else storage}" for label, storage in series]
    filled = [storage == ENFORCED for _, storage in series]
    return _by_method(table, "lost", series, labels, filled, rows_of, band, "points lost by enforcing [95%]", MOST_LOST)


def draw_visibility(table: pd.DataFrame) -> Figure:
    """Points gained when keys are ranked with the question in view, by budget, one panel a model.

    Parameters
    ----------
    table : DataFrame
        The benchmark's table `visibility`; its rows over all informative accuracy tasks. Dashed: the paper's retrieval
        gap.
    """
    table = table[(table["task"] == POOLED) & table["gained"].notna()]
    if table.empty:
        return _words("no method was scored with and without the question in view\non an informative task")
    series = list(dict.fromkeys(table["method"]))

    def mark(axis: Axes) -> None:
        axis.axhline(SEEN, color=GREY, lw=0.9, ls=(0, (4, 3)), zorder=0)
        axis.text(0.99, SEEN + 1, "paper", transform=axis.get_yaxis_transform(), ha="right", va="bottom", color=GREY)

    return _by_method(
        table,
        "gained",
        series,
        series,
        [True] * len(series),
        lambda rows, label: rows[rows["method"] == label],
        mark,
        "points gained by seeing the question [95%]",
        SEEN + 8,
    )


def _by_method(
    table: pd.DataFrame,
    column: str,
    series: Sequence,
    labels: Sequence[str],
    filled: Sequence[bool],
    rows_of: Callable[[pd.DataFrame, object], pd.DataFrame],
    mark: Callable[[Axes], None],
    label: str,
    top: float,
) -> Figure:
    """Estimates by budget, one panel a model, one place beside the other for each of `series`."""
    models, budgets = _models(table), sorted(set(table["budget"]))
    names = [_percent(budget) for budget in budgets]
    looks = _method_looks()
    chosen = [looks[one if isinstance(one, str) else one[0]] for one in series]
    step = 0.8 / len(series)
    wide = max(2.6, len(budgets) * max(0.8, 0.17 * len(series)) + 0.4)
    columns = min(3, len(models))
    lines = math.ceil(len(models) / columns)
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(6.4, wide * columns + 0.7), 3.0 * lines + 0.7)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, model in zip(axes.ravel(), models, strict=False):
            rows = table[table["model"] == model]
            mark(axis)
            axis.axhline(0, color="black", lw=0.8, zorder=1)
            for number, (one, (colour, marker, _), full) in enumerate(zip(series, chosen, filled, strict=True)):
                mine = rows_of(rows, one).set_index("budget").reindex(budgets)
                at = np.arange(len(budgets)) + (number - (len(series) - 1) / 2) * step
                axis.vlines(at, mine[f"{column}_low"], mine[f"{column}_high"], color=colour, lw=1.4)
                axis.plot(at, mine[column], ls="", marker=marker, ms=5, color=colour, mfc=colour if full else "white")
            axis.set_title(model)
            _category_axis(axis, names, "budget, share of the full cache's bytes")
        low, high = axes[0, 0].get_ylim()
        axes[0, 0].set_ylim(min(low, -4), max(high, top))
        for axis in axes.ravel()[len(models) :]:
            axis.set_visible(False)
        figure.supylabel(label, fontsize=9)
        keys = [
            Line2D([], [], ls="", marker=marker, ms=5, color=colour, mfc=colour if full else "white", label=name)
            for name, (colour, marker, _), full in zip(labels, chosen, filled, strict=True)
        ]
        _legend(figure, keys)
    return figure


def draw_decomposition(table: pd.DataFrame) -> Figure:
    """What each published gap is made of: signed bars, one panel a model and budget.

    Parameters
    ----------
    table : DataFrame
        The benchmark's table `decomposition`; its rows over all informative accuracy tasks. A diamond is the whole gap
        with its interval; where a term is missing the row says why.
    """
    table = table[(table["task"] == POOLED) & table["budget"].notna()] if "budget" in table else table.iloc[:0]
    if table.empty:
        return _words("no published gap could be taken apart:\nno accuracy task is informative, or no method was run")
    models, budgets, methods = _models(table), sorted(set(table["budget"])), list(dict.fromkeys(table["method"]))
    terms = [
        ("memory", "#D55E00", "", "memory: nothing freed"),
        ("information", "#009E73", "////", "information: question in view"),
        ("compute_ranking", "#56B4E9", "....", "compute and ranking"),
    ]
    ends = table[["gap_low", "gap_high", "memory", "information", "compute_ranking"]].to_numpy(float)
    reach = 1.05 * max(10.0, float(np.nanmax(np.abs(ends), initial=0.0)))
    panels = [(model, budget) for model in models for budget in budgets]
    columns = len(budgets) if len(budgets) <= 4 else min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        figure = _figure(2.2 + 2.1 * columns, (0.19 * len(methods) + 0.75) * lines + 0.8)
        axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axis, (model, budget) in zip(axes.ravel(), panels, strict=False):
            rows = table[(table["model"] == model) & (table["budget"] == budget)].set_index("method")
            for place, method in enumerate(methods):
                if method not in rows.index:
                    continue
                row = rows.loc[method]
                right = left = 0.0
                for name, colour, hatch, _ in terms:
                    size = 0.0 if np.isnan(row[name]) else float(row[name])
                    axis.barh(
                        place,
                        size,
                        0.8,
                        right if size > 0 else left,
                        color=colour,
                        hatch=hatch,
                        edgecolor="white",
                        linewidth=0.4,
                    )
                    right, left = right + max(size, 0), left + min(size, 0)
                axis.hlines(place, row["gap_low"], row["gap_high"], color="black", lw=1, zorder=3)
                axis.plot(row["gap"], place, marker="D", ms=3.6, color="black", zorder=4)
                if row[[name for name, *_ in terms]].isna().any():
                    axis.text(-0.98 * reach, place, _missing(str(row["note"])), va="center", fontsize=7, color=GREY)
            axis.axvline(0, color="black", lw=0.8)
            axis.set_xlim(-reach, reach)
            axis.set_title(f"{model}, budget {_percent(budget)}", fontsize=8.5)
            axis.grid(False, axis="y")
        axes[0, 0].set_yticks(np.arange(len(methods)), methods, fontsize=8)
        axes[0, 0].set_ylim(len(methods) - 0.4, -0.6)
        for axis in axes.ravel()[len(panels) :]:
            axis.set_visible(False)
        figure.supxlabel("points over SnapKV, enforced and agnostic, at the same budget", fontsize=9)
        keys = [
            Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=label) for _, colour, hatch, label in terms
        ]
        keys.append(Line2D([], [], color="black", marker="D", ms=3.6, lw=1, label="the whole gap [95%]"))
        _legend(figure, keys)
    return figure


def _missing(note: str) -> str:
    """Why a row has no terms, in the few words that a bar has room for."""
    for words, shown in (("not possible", "no enforced storage"), ("not run", "not run"), ("failed", "failed")):
        if words in note:
            return shown
    return "not measured"


def _budget_ticks(budgets: pd.Series, least: float) -> list[float]:
    """Budgets and the full cache as ticks of a log axis down from 1 to `least`, without those that would touch."""
    ticks = [1.0]
    for budget in sorted(set(budgets), reverse=True):
        if math.log(ticks[-1] / budget) > 0.22 * math.log(1 / least):
            ticks.append(float(budget))
    return ticks


def _words(text: str) -> Figure:
    """A figure that says why there is nothing to draw."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(4.6, 1.6)
        figure.text(0.5, 0.5, text, ha="center", va="center", color=GREY)
    return figure


FIGURES: dict[str, tuple[Callable[..., Figure], tuple[str, ...], str]] = {
    "fig1_recovered": (draw_recovered, ("recovered",), "Share of the closable gap that balance recovers"),
    "fig2_cells": (draw_cells, ("cells",), "Median dropped mass and median kappa-hat of every cell"),
    "fig_kappa": (draw_kappa, ("kappa_quantiles",), "Distribution of kappa-hat"),
    "fig_prediction": (draw_prediction, ("prediction", "content_arms"), "AUC of the dropped mass"),
    "fig_certificate": (draw_certificate, ("certificates",), "Certificates over all keys"),
    "fig_pools": (draw_pools, ("pools",), "How often less error is known than over the enumerated sets"),
    "fig_predictors": (draw_predictors, ("predictors",), "What tells a row in advance"),
    "fig_native": (draw_native, ("native",), "Native budgets"),
    "fig_weights": (draw_weights, ("weights",), "The price of forced weights"),
    "fig_exact": (draw_exact, ("exact",), "Exact kappa over all keys"),
    "fig_bounds": (draw_bounds, ("bounds",), "Registered bounds on structured contexts"),
    "fig_audit": (draw_audit, ("audit",), "Deployed methods on rows"),
    "fig_loss": (draw_loss, ("loss",), "Loss in the forward pass"),
}
"""Name of each figure: what draws it, from which tables, its title."""
BENCHMARK_FIGURES: dict[str, tuple[Callable[..., Figure], tuple[str, ...], str]] = {
    "fig_bytes_score": (draw_bytes_score, ("scores",), "Score against the bytes held"),
    "fig_comparisons": (draw_comparisons, ("comparison_counts",), "Paired comparisons: wins, ties, losses"),
    "fig_enforcing": (draw_enforcing, ("enforcing",), "The cost of enforcing the nominal bytes"),
    "fig_visibility": (draw_visibility, ("visibility",), "The price of not seeing the question"),
    "fig_decomposition": (draw_decomposition, ("decomposition",), "What published gaps are made of"),
}
"""The same for the downstream benchmark, from its own folder of tables."""


def draw(name: str, tables: str | os.PathLike, stem: str | os.PathLike, metadata: Mapping | None = None) -> list[Path]:
    """Draw one figure from the csv tables and write <stem>.pdf and <stem>.png.

    Parameters
    ----------
    name : str
        One of `FIGURES` or `BENCHMARK_FIGURES`.
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
    known = {**FIGURES, **BENCHMARK_FIGURES}
    if name not in known:
        raise InvalidInput(f"figure {name!r}: expected one of {', '.join(known)}")
    function, sources, title = known[name]
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


def _ratio_axis(axis: Axes) -> None:
    axis.axhline(1, color="black", lw=0.8, zorder=1)
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    ticks = [0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100]
    if high > 200 * max(low, 0.5):
        ticks = 10.0 ** np.arange(9)
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _category_axis(axis: Axes, names: Sequence[str], label: str) -> None:
    axis.set_xticks(np.arange(len(names)), names)
    axis.set_xlim(-0.55, len(names) - 0.45)
    axis.grid(False, axis="x")
    axis.set_xlabel(label)


def _heading(label: str, width: float) -> str:
    """A label over a panel `width` inches wide, broken after commas where it is longer."""
    lines = [""]
    for part in label.split(", "):
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(longer) * 0.085 <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return ",\n".join(lines)


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
