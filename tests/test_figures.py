"""Figures: what they show is in the tables, they fit their readers' sizes, and their bytes are the same again."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from synthetic_instances import make_certificates, make_instances

from contourkv import figures
from contourkv.errors import InvalidInput
from contourkv.statistics import build_tables, read_table, write_tables

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
    return write(frame, tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("name", figures.FIGURES)
def test_each_figure_is_written_twice_with_the_same_bytes(name, tables, tmp_path):
    first = figures.draw(name, tables, tmp_path / "a" / name)
    second = figures.draw(name, tables, tmp_path / "b" / name)
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
