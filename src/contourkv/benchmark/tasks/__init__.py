"""Tasks of the downstream benchmark, made in token space: RULER's 13 by name, and tasks that small models can do.

One file a family: `retrieval` (needles, pairs), `tracking` (variable chains), `aggregation` (common and frequent
words), `question_answering` (SQuAD, HotpotQA), `continuation`. What a task takes stands in `catalogue.SETTINGS`.
RULER is arXiv 2404.06654; its definitions are kept, sentences that they do not fix are this package's own.
"""

from ...lazy import loader

_HOME = {"SETTINGS": "catalogue", "check_settings": "catalogue", "wheels_of": "catalogue", "make_task": "making"}

__all__ = sorted(_HOME)

__getattr__ = loader(__name__, _HOME)
