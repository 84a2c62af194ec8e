"""The README's Python examples run, one after another in one namespace, as a reader would run them."""

import re
from pathlib import Path

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
