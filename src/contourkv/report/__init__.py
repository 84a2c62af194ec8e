"""report.html: a run on one page that needs nothing else, neither a network nor the files that it was made from.

`page` says what stands where, `blocks` makes its tables, figures and commands, `markup` escapes everything, `looks`
and `behaviour` hold the style and the script that are inside the page.
"""

from ..lazy import loader

_HOME = {"Contents": "page", "build_report": "page", "write_report": "page"}
__all__ = list(_HOME)

__getattr__ = loader(__name__, _HOME)
