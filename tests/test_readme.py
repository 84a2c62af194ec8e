"""The README's Python examples run, one after another in one namespace, as a reader would run them."""

import re
import runpy
from pathlib import Path

from benchmark.synthetic_answers import COMPARISONS, LABELS, make_answers
from synthetic_instances import DEMO, make_instances
from synthetic_instances import LABELS as MODELS

from contourkv.benchmark.comparisons import Answers, ComparisonSettings
from contourkv.benchmark.tables import build_benchmark_tables
from contourkv.statistics import build_tables, write_tables
from contourkv.statistics.paper import write_paper

README = Path(__file__).parent.parent / "README.md"


def test_python_examples_run(capsys, tmp_path, monkeypatch):
    text = README.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "kappa-hat" in printed and "Allocation(" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["context.safetensors"]


def test_every_named_target_exists():
    text = README.read_text(encoding="utf-8")
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", text, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for link in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
        assert (README.parent / link).exists(), link


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"@[A-Z]+@", README.read_text(encoding="utf-8"))


def test_tables_of_the_benchmark_come_out_of_the_csv(tmp_path):
    frame = make_answers(models=("smollm2-135m", "gemma3-270m"), samples=8)
    tables = build_benchmark_tables(Answers(frame, LABELS, ComparisonSettings(**COMPARISONS)))
    write_tables(tables, tmp_path, {"contourkv": "0"})
    made = runpy.run_path(str(README.parent / "docs/readme_tables.py"))
    lines = made["scores"](tmp_path).splitlines()
    names, first = ([cell.strip() for cell in lines[at].split("|")] for at in (0, 2))
    good = tables["tasks"].query("informative == 'yes'")
    full = frame[(frame["method"] == "full") & (frame["measure"] == "accuracy")]
    assert first[1] == "Full cache"
    for model, label in LABELS.items():
        tasks = good.loc[good["model"] == label, "task"]
        own = full[(full["model"] == model) & full["task"].isin(tasks)]
        expected = own.groupby("task")["score"].mean().mean()
        (at,) = (place for place, name in enumerate(names) if name.startswith(f"{label}: published"))
        assert names[at + 1].startswith("accuracy at") and first[at + 1] == f"{expected:.2f}"
    for part in ("comparisons", "enforcing", "visibility"):
        assert len(made[part](tmp_path).splitlines()) > 2, part
    assert made["memory"](tmp_path)


def test_tables_of_the_measurement_come_out_of_the_csv(tmp_path):
    tables = build_tables(make_instances(DEMO), 50, 1, MODELS)
    meta = {"contourkv": "0", "run": "unit", "statistics": {"resamples": 50, "seed": 1}}
    write_tables(tables, tmp_path / "tables", meta)
    write_paper(tmp_path / "paper", tables, None, None, meta)
    made = runpy.run_path(str(README.parent / "docs/readme_tables.py"))
    printed = made["rows_at_budgets"](tmp_path).splitlines()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed]
    assert len(lines) == 2 + len(tables["certificates"].query("model != 'all models' and s != 'all'"))
    for line in lines[2:]:
        for table, column, at in (("kappa", "median", 2), ("ceiling", "c", 5), ("prediction", "auc", 7)):
            (row,) = tables[table].query(f"model == '{line[0]}' and s == '{line[1]}' and against == 'es_pool'").index
            value = tables[table].loc[row, column]
            assert line[at].startswith(f"{value:.3f} [" if value >= 0.001 else "")
    table = made["claims"](tmp_path)
    assert "AUC of the spectral statistic" in table and all(f"| {label} |" in table for label in MODELS.values())
