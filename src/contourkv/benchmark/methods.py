"""The compared methods: what each is called, how its selection is stored, and what it saw when it was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidInput

PUBLISHED, ENFORCED, RECTANGULAR = "published", "enforced", "rectangular"
AGNOSTIC, QUERY_AWARE = "agnostic", "query_aware"


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes
    ----------
    name : str
        In the configuration and in results.
    label : str
        In tables and figures.
    keeps : {"all", "equal", "heads", "pages", "ragged"}
        Everything; the same count in every head of a layer, in a smaller rectangle; head by head, published as masks
        over the full cache; everything, of which it reads some pages; head by head, freed (ContourKV).
    sees : {"agnostic", "query_aware"}
        Whether its publication ranks keys with the question in view.
    scores : str
        Whose scores rank its keys: methods that share them are scored once.
    """

    name: str
    label: str
    keeps: Literal["all", "equal", "heads", "pages", "ragged"]
    sees: Literal["agnostic", "query_aware"]
    scores: str = ""

    @property
    def storages(self) -> tuple[str, ...]:
        """Storages that the method is run under."""
        return {
            "all": (PUBLISHED,),
            "equal": (PUBLISHED, ENFORCED),
            "heads": (PUBLISHED, ENFORCED, RECTANGULAR),
            "pages": (PUBLISHED,),
            "ragged": (ENFORCED,),
        }[self.keeps]


METHODS = {
    method.name: method
    for method in (
        Method("full", "Full cache", "all", AGNOSTIC),
        Method("streaming_llm", "StreamingLLM", "equal", AGNOSTIC, "streaming_llm"),
        Method("knorm", "Knorm", "equal", AGNOSTIC, "knorm"),
        Method("tova", "TOVA", "equal", QUERY_AWARE, "tova"),
        Method("snapkv", "SnapKV", "equal", QUERY_AWARE, "snapkv"),
        Method("h2o", "H2O", "equal", QUERY_AWARE, "observed_attention"),
        Method("expected_attention", "ExpectedAttention", "equal", AGNOSTIC, "expected_attention"),
        Method("compactor", "Compactor", "equal", AGNOSTIC, "compactor"),
        Method("kvzip", "KVzip", "heads", AGNOSTIC, "kvzip"),
        Method("adakv_snapkv", "AdaKV (SnapKV)", "heads", QUERY_AWARE, "snapkv"),
        Method("adakv_expected_attention", "AdaKV (ExpectedAttention)", "heads", AGNOSTIC, "expected_attention"),
        # It ranks pages anew for each token that it reads for: when the question is read makes no difference.
        Method("quest", "Quest", "pages", AGNOSTIC),
        Method("contour_kvzip", "ContourKV (KVzip)", "ragged", AGNOSTIC, "kvzip"),
        Method("contour_compactor", "ContourKV (Compactor)", "ragged", AGNOSTIC, "compactor"),
        Method("contour_snapkv", "ContourKV (SnapKV)", "ragged", AGNOSTIC, "snapkv"),
        Method("contour", "ContourKV", "ragged", AGNOSTIC, "mass"),
        Method("random", "Random", "equal", AGNOSTIC, "random"),
    )
}
FULL = METHODS["full"]


def methods_named(names: Iterable[str], where: str = "benchmark.methods") -> list[Method]:
    """The methods of those names, in the registry's order, the full cache first; InvalidInput for an unknown name."""
    names = list(names)
    for name in names:
        if name not in METHODS:
            raise InvalidInput(f"{where}: unknown method {name!r}; expected some of {', '.join(METHODS)}")
    return [method for name, method in METHODS.items() if name in names or method is FULL]
