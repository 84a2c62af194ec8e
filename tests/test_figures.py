"""Figures: what they show is in the tables, they fit their readers' sizes, and their bytes are the same again."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
from benchmark.synthetic_answers import COMPARISONS, LABELS, make_answers
from PIL import Image
from synthetic_instances import make_certificates, make_instances

from contourkv import figures
from contourkv.benchmark.claims import POOLED
from contourkv.benchmark.comparisons import Answers, ComparisonSettings
from contourkv.benchmark.methods import METHODS
from contourkv.benchmark.tables import build_benchmark_tables
from contourkv.errors import InvalidInput
from contourkv.registered import NAMES, Bound
from contourkv.statistics import build_tables, read_table, write_tables
from contourkv.statistics.audit import audit_table
from contourkv.statistics.columns import LOSSES
from contourkv.statistics.exhaustive import exact_table
from contourkv.statistics.losses import loss_table
from contourkv.statistics.native import native_table
from contourkv.statistics.structured import bounds_table
from contourkv.statistics.weights import weights_table

METADATA = {"contourkv": "0.1.0", "config": ["0123456789ab"], "statistics": {"resamples": 20, "seed": 0}}


def write(frame, folder):
    write_tables(build_tables(frame, 20, 0), folder, METADATA)
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    frame = make_instances({"one": (3, 4, 1), "two": (2, 2, 1)})
    certificates = make_certificates(frame, every=5)
    keys = ["model", "arm", "input", "layer", "head", "position", "s"]
    certificates["es_certified"] = certificates["es_certified"].where(certificates["certificate"] != "improved")
    frame = frame.merge(certificates.dropna(subset="es_certified"), on=keys, how="left")
    frame = frame.fillna({"certificate": "", "certificate_proved": False})
    folder = write(frame, tmp_path_factory.mktemp("tables"))
    write_tables(other_tables(), folder, METADATA)
    return folder


def other_tables(contexts=2):
    """Those that have rows of their own: native budgets, weights, exact rows, deployed methods, losses, bounds."""
    rng, labels = np.random.default_rng(0), {"one": "one", "two": "two"}
    keys = ["model", "arm", "input", "layer"]
    rows = pd.MultiIndex.from_product([labels, ["code", "prose"], range(contexts), range(6)], names=keys).to_frame(
        index=False
    )
    rows = rows.assign(head=0, position=9, spread=1.0, mass=0.5, dropped_mass=rng.uniform(0, 1, len(rows)))
    native, audit, weights = [], [], []
    for s in (64, 128, 256):
        error = rng.uniform(1, 2, len(rows))
        swapped = error * rng.uniform(0.8, 1, len(rows))
        native.append(rows.assign(s=s, es_max_mass=error, es_balance=swapped, bound=3 * 64 / s, reference_bound=9.0))
        for method in ("snapkv", "h2o"):
            lost = error * rng.uniform(1, 5, len(rows))
            audit.append(rows.assign(s=s, method=method, es=lost, es_max_mass=error, es_pool=np.nan))
        # Of budgets as small as those of the enumeration, else alike.
        found = {"es_pool": 0.9 * swapped, "ef_pool": swapped * rng.uniform(0.1, 0.9, len(rows)), "ef_exact": True}
        found |= {"es_max_mass": error, "es_balance": swapped, "es_geometric": error * rng.uniform(0.9, 2, len(rows))}
        weights.append(rows.assign(s=s // 16, pool_keys=24, mass_geometric=0.4, **found))
    exact = rows.assign(s=4, visible=256, es_max_mass=error, es_pool=swapped)
    for name in ("exact", "floor"):
        best = swapped * np.where(rng.uniform(0, 1, len(rows)) < 0.3, 0.7, 1.0)
        more = {f"es_{name}": best, f"{name}_proved": True, f"{name}_mass": 0.2, f"{name}_max_rank": 40}
        exact = exact.assign(**more)
    structured = make_instances({"one": (2, 2, 1), "two": (2, 2, 1)}, per_arm=contexts)
    structured["retrieval"] = structured["position"] == structured["position"].max()
    bounds = [Bound(name, name, 0.5, name != "auc", "-") for name in NAMES]
    losses = [
        (model, arm, f"{arm}/{index}", variant, 8, 256, 40, 64, nats + rng.uniform(0, 0.1), 3, 8)
        for model in labels
        for arm in ("code", "prose")
        for index in range(contexts)
        for variant, nats in (("dense", 2.0), ("max_mass", 3.0), ("balance", 2.6), ("flat_balance", 2.7))
    ]
    return {
        "native": native_table(pd.concat(native).assign(reference_s=8), 20, 0, labels),
        "audit": audit_table(pd.concat(audit), 20, 0, labels),
        "loss": loss_table(pd.DataFrame(losses, columns=list(LOSSES)), 20, 0, labels),
        "weights": weights_table(pd.concat(weights), 20, 0, labels),
        "exact": exact_table(exact, 20, 0, labels),
        "bounds": bounds_table(structured, bounds, ["0"], "0", 20, 0, labels),
    }


def write_benchmark(frame, folder):
    answers = Answers(frame, LABELS, ComparisonSettings(**COMPARISONS))
    write_tables(build_benchmark_tables(answers), folder, METADATA)
    return folder


@pytest.fixture(scope="module")
def benchmark_tables(tmp_path_factory):
    frame = make_answers(models=("smollm2-135m", "gemma3-270m"), samples=8)
    return write_benchmark(frame, tmp_path_factory.mktemp("benchmark"))


@pytest.mark.parametrize("name", [*figures.FIGURES, *figures.BENCHMARK_FIGURES])
def test_each_figure_is_written_twice_with_the_same_bytes(name, tables, benchmark_tables, tmp_path):
    folder = tables if name in figures.FIGURES else benchmark_tables
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that does not fit is one
        first = figures.draw(name, folder, tmp_path / "a" / name)
    second = figures.draw(name, folder, tmp_path / "b" / name)
    assert [path.name for path in first] == [f"{name}.pdf", f"{name}.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    pdf = first[0].read_bytes()
    assert b"CreationDate" not in pdf and b"contourkv 0.1.0" in pdf
    with Image.open(first[1]) as image:
        assert "Software" not in image.text
        assert image.text["Description"] == "contourkv 0.1.0; config 0123456789ab; bootstrap 20 resamples, seed 0"
        assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        pixels = np.asarray(image.convert("L"))
    assert pixels.std() > 5
    # White all around: nothing is cut off at the border.
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 255).all()


def test_given_metadata_replaces_that_of_the_tables(tables, tmp_path):
    png = figures.draw("fig_pools", tables, tmp_path / "x", {"contourkv": "9"})[1]
    with Image.open(png) as image:
        assert image.text["Description"] == "contourkv 9"


@pytest.mark.parametrize(
    "shapes",
    [
        {"only": (64, 64, 1)},
        {f"model with a long name {number}": (2 + number, 1 + 2 * number, 1) for number in range(10)},
    ],
    ids=["one large", "ten"],
)
def test_maps_fit_any_number_of_models_layers_and_heads(shapes, tmp_path):
    frame = make_instances(shapes, arms=("prose",), per_arm=1, positions=(9,), budgets=(8,))
    tables = write(frame, tmp_path)
    table = read_table(tables / "cells.csv")
    figure = figures.draw_cells(table)
    maps = [axis for axis in figure.axes if axis.images]
    assert len(maps) == 2 * len(shapes)
    for model, axis in zip(shapes, maps[::2], strict=True):
        cells = axis.images[0].get_array()
        rows = table[table["model"] == model]
        assert cells.shape == shapes[model][:2]
        np.testing.assert_array_equal(cells[rows["layer"], rows["head"]], rows["dropped_mass"])
    assert figures.save(figure, tmp_path / "maps", {})[1].stat().st_size > 0
    renderer = figure.canvas.get_renderer()
    boxes = [axis.get_tightbbox(renderer) for axis in maps]
    for number, box in enumerate(boxes):
        assert figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1)
        for other in boxes[number + 1 :]:
            assert not box.shrunk(0.98, 0.98).overlaps(other.shrunk(0.98, 0.98))


def test_outline_runs_between_flat_and_other_cells():
    flat = np.zeros((3, 4), bool)
    flat[1, 1:3] = True
    edges = {tuple(map(tuple, edge)) for edge in figures._outline(flat)}
    assert edges == {
        ((0.5, 0.5), (0.5, 1.5)),
        ((2.5, 0.5), (2.5, 1.5)),
        ((0.5, 0.5), (1.5, 0.5)),
        ((1.5, 0.5), (2.5, 0.5)),
        ((0.5, 1.5), (1.5, 1.5)),
        ((1.5, 1.5), (2.5, 1.5)),
    }


def test_points_and_intervals_are_those_of_the_table(tables):
    table = read_table(tables / "prediction.csv")
    figure = figures.draw_prediction(table, read_table(tables / "content_arms.csv"))
    rows = table[(table["against"] == "es_pool") & (table["model"] == "one")]
    axis = figure.axes[0]
    assert any(np.array_equal(line.get_ydata(), rows["auc"], equal_nan=True) for line in axis.lines)
    spans = [path.vertices[:, 1].tolist() for collection in axis.collections for path in collection.get_paths()]
    for low, high in zip(rows["auc_low"], rows["auc_high"], strict=True):
        assert [low, high] in spans


def test_figures_without_intervals_classes_or_certificates(tmp_path):
    frame = make_instances({"m": (2, 2, 1)}, per_arm=1, budgets=(4,))
    for name in ("es_pool", "es_mass_pool", "es_balance_pool", "es_balance", "es_balance_second", "es_best"):
        frame[name] = frame["es_max_mass"]
    tables = write(frame.assign(best="max_mass"), tmp_path)
    write_tables(other_tables(contexts=1), tables, METADATA)
    for name in figures.FIGURES:
        figures.draw(name, tables, tmp_path / name)
    figure = figures.draw_certificate(read_table(tables / "certificates.csv"))
    assert "none sampled" in [text.get_text() for axis in figure.axes for text in axis.texts]
    prediction, arms = (read_table(tables / f"{name}.csv") for name in ("prediction", "content_arms"))
    figure = figures.draw_prediction(prediction, arms)
    assert "no point: one class only" in [text.get_text() for axis in figure.axes for text in axis.texts]


def test_unknown_figures_and_missing_tables_are_named(tables, tmp_path):
    with pytest.raises(InvalidInput, match="figure 'fig9': expected one of fig1_recovered"):
        figures.draw("fig9", tables, tmp_path / "x")
    with pytest.raises(InvalidInput, match=r"cells\.csv: no such table; run the rule"):
        figures.draw("fig2_cells", tmp_path, tmp_path / "x")
    (tmp_path / "pools.csv").write_text((tables / "pools.csv").read_text().splitlines()[0] + "\n")
    with pytest.raises(InvalidInput, match=r"pools\.csv: no rows"):
        figures.draw("fig_pools", tmp_path, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


# The downstream benchmark


def boxes_apart(figure) -> None:
    """No panel, with its labels, runs into another, into the legend, or over the border."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes if axis.get_visible()]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
        for other in boxes[number + 1 :]:
            assert not box.shrunk(0.97, 0.97).overlaps(other.shrunk(0.97, 0.97))


def drawn_benchmark(name, folder):
    function, sources, _ = figures.BENCHMARK_FIGURES[name]
    return function(*(read_table(folder / f"{source}.csv") for source in sources))


def words_of(figure) -> str:
    places = [figure.texts, *(axis.texts for axis in figure.axes)]
    return " ".join(text.get_text() for texts in places for text in texts)


@pytest.fixture(
    scope="module",
    params=[
        {"budgets": (0.5,), "samples": 2},
        {"models": tuple(f"model {number}" for number in range(4)), "budgets": (0.1, 0.25, 0.75), "samples": 2},
    ],
    ids=["one panel", "four models"],
)
def shaped(request, tmp_path_factory):
    frame = make_answers(tasks=("single-prose-512",), **request.param)
    return write_benchmark(frame, tmp_path_factory.mktemp("shaped"))


@pytest.mark.parametrize("name", figures.BENCHMARK_FIGURES)
def test_panels_stand_apart_whatever_was_run(name, shaped):
    boxes_apart(drawn_benchmark(name, shaped))


@pytest.mark.parametrize("name", figures.BENCHMARK_FIGURES)
def test_where_nothing_was_measured_the_figure_says_so(name, tmp_path):
    frame = make_answers(methods=("full", "quest", "random"), tasks=("chain-512",), samples=2)
    frame = frame.assign(status="failed", message="broken", score=np.nan)
    folder = write_benchmark(frame, tmp_path)
    figures.draw(name, folder, tmp_path / name)
    figure = drawn_benchmark(name, folder)
    assert not figure.axes and " no" in f" {words_of(figure)}"


def test_every_method_has_a_look_of_its_own_and_families_share_a_colour():
    looks = figures._method_looks()
    assert set(looks) == {method.label for method in METHODS.values() if method.keeps != "all"}
    assert len({str(marker) for _, marker, _ in looks.values()}) == len(looks)
    ragged = [looks[method.label] for method in METHODS.values() if method.keeps == "ragged"]
    assert len({str(dashes) for _, _, dashes in ragged}) == len(ragged)
    for keeps in ("ragged", "heads"):
        assert len({looks[method.label][0] for method in METHODS.values() if method.keeps == keeps}) == 1
    assert looks["ContourKV"][0] != looks["KVzip"][0]


def test_bytes_and_scores_are_those_of_the_table(benchmark_tables):
    table = read_table(benchmark_tables / "scores.csv")
    figure = figures.draw_bytes_score(table)
    panels = list(dict.fromkeys(zip(table["model"], table["task"], strict=True)))
    for axis, (model, task) in zip(figure.axes, panels, strict=False):
        rows = table[(table["model"] == model) & (table["task"] == task) & (table["visibility"] == "agnostic")]
        assert axis.get_title().splitlines()[:1] == [model] and task in axis.get_title()
        lines = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axis.lines}
        for (method, storage), mine in rows.groupby(["method", "storage"]):
            if method == "Full cache":
                assert any(set(y) == {mine["score"].iloc[0]} and len(x) == 2 for x, y in lines)
            elif storage in ("enforced", "rectangular"):
                assert (tuple(mine["held_share"]), tuple(mine["score"])) in lines
            elif storage == "published":
                for share, score in zip(mine["held_share"], mine["score"], strict=True):
                    assert ((share,), (score,)) in lines
    widths = {line.get_label(): line.get_linewidth() for line in figure.legends[0].get_lines()}
    assert widths["ContourKV (KVzip)"] > 2 * widths["KVzip"]


def test_bars_of_comparisons_are_the_counts(benchmark_tables):
    table = read_table(benchmark_tables / "comparison_counts.csv")
    table = table[table["model"] == "all models"]
    figure = figures.draw_comparisons(table)
    assert [axis.get_title() for axis in figure.axes] == list(dict.fromkeys(table["method"]))
    for axis in figure.axes:
        mine = table[table["method"] == axis.get_title()]
        assert sum(bar.get_width() for bar in axis.patches) == mine["counted"].sum()
        assert [text.get_text() for text in axis.texts] == [
            f"{wins} : {losses}" for wins, losses in zip(mine["wins"], mine["losses"], strict=True)
        ]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "KVzip, published"


@pytest.mark.parametrize(
    ("name", "source", "column"), [("fig_enforcing", "enforcing", "lost"), ("fig_visibility", "visibility", "gained")]
)
def test_points_of_the_pooled_rows_are_drawn_with_their_intervals(benchmark_tables, name, source, column):
    table = read_table(benchmark_tables / f"{source}.csv")
    table = table[table["task"] == POOLED]
    table = table[table["visibility"] == "agnostic"] if "visibility" in table else table
    figure = drawn_benchmark(name, benchmark_tables)
    for axis, model in zip(figure.axes, dict.fromkeys(table["model"]), strict=True):
        rows = table[table["model"] == model]
        drawn = sorted(
            y for line in axis.lines for y in line.get_ydata() if line.get_marker() not in ("None", "", None)
        )
        np.testing.assert_allclose(drawn, np.sort(rows[column]))
        spans = sorted(tuple(path.vertices[:, 1]) for part in axis.collections for path in part.get_paths())
        assert spans == sorted(zip(rows[f"{column}_low"], rows[f"{column}_high"], strict=True))
        assert "paper" in words_of(figure)
        low, high = axis.get_ylim()
        assert low < rows[f"{column}_low"].min() and high > rows[f"{column}_high"].max() and high >= 62.2


def test_signed_bars_end_where_the_terms_do(benchmark_tables):
    table = read_table(benchmark_tables / "decomposition.csv")
    table = table[table["task"] == POOLED]
    figure = figures.draw_decomposition(table)
    for axis in figure.axes:
        model, _, budget = axis.get_title().partition(", budget ")
        rows = table[(table["model"] == model) & (table["budget"] == float(budget.rstrip("%")) / 100)]
        methods = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        for place, method in enumerate(methods):
            row = rows[rows["method"] == method].iloc[0]
            terms = row[["memory", "information", "compute_ranking"]].astype(float).fillna(0)
            bars = [bar for bar in axis.patches if abs(bar.get_y() + bar.get_height() / 2 - place) < 1e-9]
            assert sum(bar.get_width() for bar in bars) == pytest.approx(terms.sum(), abs=1e-9)
            ends = [end for bar in bars for end in (bar.get_x(), bar.get_x() + bar.get_width())]
            assert max(ends) == pytest.approx(terms.clip(lower=0).sum(), abs=1e-9)
            assert min(ends) == pytest.approx(terms.clip(upper=0).sum(), abs=1e-9)
        assert "no enforced storage" in [text.get_text() for text in axis.texts]
    gaps = [line.get_xdata()[0] for axis in figure.axes for line in axis.lines if line.get_marker() == "D"]
    assert sorted(gaps) == pytest.approx(sorted(table["gap"]))


def test_budgets_too_near_each_other_are_not_both_named():
    ticks = figures._budget_ticks(pd.Series([0.1, 0.25, 0.5, 0.75]), 0.07)
    assert ticks == [1.0, 0.5, 0.25, 0.1]
    assert figures._budget_ticks(pd.Series([0.5, 0.75]), 0.4) == [1.0, 0.75, 0.5]
