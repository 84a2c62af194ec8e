"""The page of a run in a real Chromium: all of it loads, nothing is fetched, tables sort, figures open, both schemes.

`make test-report` installs the browser where apt can, runs this file and keeps what it looked like in
results/test-artefacts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import chromium
import pytest
from chromium import Browser
from report_run import make_run

from contourkv.report import write_report
from contourkv.statistics.tables import read_table

ARTEFACTS = Path(__file__).parents[2] / "results/test-artefacts"
WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")
NASTY = "<script>window.harmed=1</script><img src=x onerror='window.harmed=2'>\"'>"
CONTRAST = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((value) => value / 255).map((value) =>
      value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (numbers(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = Infinity, where = "", count = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.checkVisibility() || element.closest("script, style, option")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    count += 1;
    if (ratio < least) [least, where] = [ratio, element.outerHTML.slice(0, 200)];
  }
  return { least, where, count };
})()
"""
CUT_OFF = """
Array.from(document.querySelectorAll("h1, h2, h3, p, li, summary, figcaption, .zoom, select"))
  .filter((element) => element.checkVisibility() && element.getBoundingClientRect().right > innerWidth)
  .map((element) => element.outerHTML.slice(0, 90))
"""
IMAGES = "Array.from(document.images, (image) => image.complete && image.naturalWidth)"
COLUMN = "Array.from(document.querySelector('#claims').tBodies[0].rows, (row) => row.cells[%d].textContent)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if chromium.find() is None:
        pytest.fail(chromium.HOW_TO_GET_IT)
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    results = tmp_path_factory.mktemp("run")
    contents = make_run(results)
    return write_report(results / "report.html", results, contents), contents


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """Address of a server on this machine, and what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}", asked
        serving.shutdown()


@pytest.fixture
def page(browser, run):
    """The page, just opened."""
    browser.open(run[0])
    browser.show(1280, "light")
    return browser


def test_every_image_loads_and_nothing_is_fetched_or_complained_about(page, run):
    widths = page.evaluate(IMAGES)
    assert len(widths) == len(run[1].figures) and all(widths)
    assert page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })") is None
    assert page.requests == [run[0].as_uri()]
    assert page.errors == []


def test_what_would_be_wrong_is_noticed(browser, server, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        f"<img src='data:image/png;base64,AAAA'><img src='{server[0]}/x.png'>"
        "<p style='color:#888;background:#777'>pale</p><script>console.error('said'); missing();</script>"
    )
    browser.open(bad)
    assert browser.evaluate(IMAGES) == [0, 0]
    assert browser.requests == [bad.as_uri(), f"{server[0]}/x.png"] and server[1] == ["/x.png"]
    assert any("said" in error for error in browser.errors) and any("Uncaught" in error for error in browser.errors)
    assert browser.evaluate(CONTRAST)["least"] < 1.5


def test_the_policy_lets_nothing_in_or_out(page, server):
    assert "Failed to fetch" in page.evaluate(f"fetch('{server[0]}/').then(() => 'sent', (error) => String(error))")
    for script in (
        f"document.body.append(Object.assign(new Image(), {{ src: '{server[0]}/x.png' }}))",
        "document.body.insertAdjacentHTML('beforeend', '<p onclick=\"window.harmed=1\" id=\"trap\">trap</p>')",
        "document.body.append(Object.assign(document.createElement('script'), { text: 'window.harmed = 2' }))",
    ):
        page.evaluate(script)
    page.click("#trap")
    assert page.evaluate("window.harmed") is None
    assert len([error for error in page.errors if "Content Security Policy" in error]) >= 4
    assert server[1] == []


def test_a_click_on_a_header_sorts_up_and_down_with_the_unknown_last(page, run):
    def known(cells):
        values = [float(cell.split()[0].replace(",", "")) for cell in cells if cell != "–"]
        assert cells[len(values) :] == ["–"] * (len(cells) - len(values))
        return values

    before = page.evaluate(COLUMN % 4)
    for order in ("ascending", "descending"):
        page.click("#claims thead button", 4)
        assert page.evaluate("document.querySelectorAll('#claims th[aria-sort]').length") == 1
        assert page.evaluate("document.querySelector('#claims th[aria-sort]').ariaSort") == order
        cells = page.evaluate(COLUMN % 4)
        assert sorted(cells) == sorted(before) and len(set(cells)) > 5
        assert known(cells) == sorted(known(cells), reverse=order == "descending")
    page.click("#claims thead button", 7)
    rules = page.evaluate(COLUMN % 7)
    assert rules == sorted(rules) and len(set(rules)) > 3
    assert page.errors == []


def test_the_keyboard_sorts_and_opens_and_escape_closes(page):
    page.evaluate("document.querySelector('#claims thead button').focus()")
    page.press("Tab")
    page.press("Enter")
    assert page.evaluate("document.querySelector('#claims th[aria-sort]').textContent") == "claim"
    page.evaluate("document.querySelector('.zoom').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelector('dialog').open")
    assert page.evaluate("document.activeElement.className") == "stage"
    page.press("Escape")
    assert not page.evaluate("document.querySelector('dialog').open")
    assert page.evaluate("document.activeElement.className") == "zoom"


def test_a_figure_opens_in_its_own_size_and_fits_when_asked(page):
    page.click(".zoom")
    shown = "(() => { const i = document.querySelector('.stage img'); return [i.width, i.naturalWidth, i.height]; })()"
    width, natural, _ = page.evaluate(shown)
    assert width == natural > 500
    assert page.evaluate("document.querySelector('dialog p').textContent") == page.evaluate(
        "document.querySelector('h3').textContent"
    )
    page.click(".size")
    width, _, height = page.evaluate(shown)
    box = page.evaluate(
        "(() => { const b = document.querySelector('.stage'); return [b.clientWidth, b.clientHeight]; })()"
    )
    assert width <= box[0] and height <= box[1]
    page.click(".close")
    assert not page.evaluate("document.querySelector('dialog').open")


def test_verdicts_are_filtered_by_section_and_verdict(page, run):
    paper = read_table(run[0].parent / "paper.csv")
    counts = (
        "[document.querySelectorAll('#claims tbody tr:not([hidden])').length, document.querySelector('output').value]"
    )
    assert page.evaluate(counts) == [len(paper), f"{len(paper)} of {len(paper)} rows"]
    verdict = paper["verdict"].iloc[0]
    for name, value in (("verdict", verdict), ("section", "2")):
        page.evaluate(
            f"""(() => {{
              const choice = document.querySelector('select[name={name}]');
              choice.value = {value!r};
              choice.dispatchEvent(new Event('change', {{ bubbles: true }}));
            }})()"""
        )
    some = paper[(paper["verdict"] == verdict) & (paper["section"].astype(str) == "2")]
    assert 0 < len(some) < len(paper)
    assert page.evaluate(counts) == [len(some), f"{len(some)} of {len(paper)} rows"]


def test_a_long_table_shows_its_first_rows_in_every_order_until_all_are_asked_for(page, run):
    rows = len(read_table(run[0].parent / "tables/kappa_quantiles.csv"))
    found = "document.querySelector('[aria-label=\"Table: kappa_quantiles\"]')"
    page.evaluate(f"{found}.closest('details').open = true")
    shown = f"{found}.querySelectorAll('tbody tr:not([hidden])').length"
    assert rows > 200 and page.evaluate(shown) == 200
    page.evaluate(f"for (let i = 0; i < 2; i++) {found}.querySelectorAll('thead button')[3].click()")
    assert page.evaluate(shown) == 200
    largest = read_table(run[0].parent / "tables/kappa_quantiles.csv")["kappa_hat"].max()
    first = page.evaluate(f"{found}.querySelector('tbody tr').cells[3].textContent")
    assert float(first.replace(",", "")) == pytest.approx(largest, rel=0.01)
    page.click(".all")
    assert page.evaluate(shown) == rows


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_readable_and_fits(page, capsys, scheme, width):
    page.show(width, scheme)
    page.evaluate("document.querySelector('#provenance details').open = true")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    found = page.evaluate(CONTRAST)
    assert found["count"] > 200 and found["least"] >= 4.5, found
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Nothing that does not scroll by itself is cut off at the right.
    assert page.evaluate(CUT_OFF) == []
    pictures = []
    for name in ("top", "section-2", "section-5", "costs"):
        block = {"top": "document.body", "costs": "document.querySelector('#costs')"}.get(
            name, f"document.querySelector('#{name} h3')"
        )
        page.evaluate(f"{block}.scrollIntoView({{ behavior: 'instant' }})")
        pictures.append(page.picture(ARTEFACTS / f"report-{scheme}-{width}-{name}.png"))
    page.click(".zoom")
    pictures.append(page.picture(ARTEFACTS / f"report-{scheme}-{width}-zoom.png"))
    assert len({path.read_bytes() for path in pictures}) == len(pictures)
    with capsys.disabled():
        print(f"\nscreenshots: {' '.join(str(path) for path in pictures)}")
    assert page.errors == []


def test_a_label_that_is_a_script_does_no_harm(browser, tmp_path):
    contents = make_run(tmp_path, NASTY, drawn=())
    contents = replace(contents, run=NASTY, trained=[NASTY])
    browser.open(write_report(tmp_path / "report.html", tmp_path, contents))
    assert browser.evaluate("document.scripts.length") == 1
    assert browser.evaluate("document.images.length") == 0
    assert browser.evaluate("window.harmed") is None
    assert NASTY in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate(
        f"Array.from(document.querySelectorAll('td')).some((cell) => cell.textContent === {NASTY!r})"
    )
    assert browser.errors == [] and len(browser.requests) == 1


def test_what_is_missing_is_said_with_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="apt-get install chromium"):
        Browser(tmp_path)
