"""Sphinx builds the Markdown of the repository as it stands: the pages of docs/, and the files that they link to.

The source folder is the root of the repository, so that a link works in the site as it does on a forge. The order of
the pages is that of the links in docs/index.md, which holds no directive.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/index"

project = "contourkv"
copyright = "the contourkv authors"
version = release = re.search(
    r'^VERSION = "(.+)"$', (ROOT / "src/contourkv/provenance.py").read_text(encoding="utf-8"), re.MULTILINE
)[1]

root_doc = INDEX
extensions = ["myst_parser"]
LINKS = re.findall(r"^- \[([^]]*)\]\(([^)#]+)\.md\)", (ROOT / f"{INDEX}.md").read_text(encoding="utf-8"), re.MULTILINE)
PAGES = {title: page.removeprefix("../") if page.startswith("../") else f"docs/{page}" for title, page in LINKS}
include_patterns = [f"{page}.md" for page in (INDEX, *PAGES.values())]
PARTS = ("docs", "config", "results")  # folders that hold pages; others are not searched
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in PARTS]
exclude_patterns += ["docs/site", "config/*/**", "results/*/**"]

myst_heading_anchors = 3
highlight_language = "none"
html_theme = "alabaster"
html_theme_options = {
    "description": "Exact best kept sets of attention rows, and a KV cache cut by its masses",
    "page_width": "1200px",
    "body_max_width": "none",
    "show_powered_by": False,
}
html_title = f"contourkv {version}"
html_show_sourcelink = False
html_copy_source = False


def add_pages(app, docname, source):
    """Put the pages into the index, where Sphinx looks for their order."""
    if docname == INDEX:
        entries = "\n".join(f"{title} </{page}>" for title, page in PAGES.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{entries}\n```\n"


def setup(app):
    app.connect("source-read", add_pages)
