"""RULER's variable tracking: chains of assignments hidden in noise, behind one worked example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import InvalidInput
from ..samples import Question, Sample
from .catalogue import refused
from .frame import Frame
from .haystacks import LINE, NOISE, SENTENCE, Needle, among_lines, hide
from .retrieval import SLOT, noise
from .words import draw_letters

LETTERS, EXAMPLE_LETTERS = 5, 3
LOW, HIGH = 10_000, 100_000
# Lines of noise in the example: few where a long example would leave no context.
LONG = 4096
EXAMPLE_NOISE, SHORT_EXAMPLE_NOISE = 10, 2
HEAD = "The following text hides chains of variable assignments. Follow each chain from its first variable.\n\n"


@dataclass(frozen=True)
class Chain:
    """Variables that hold one value: the first is assigned it, each other one the variable before it."""

    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        sources = [self.value, *(f"VAR {name}" for name in self.names[:-1])]
        return [f"VAR {name} = {source}" for name, source in zip(self.names, sources, strict=True)]


def make_samples(settings: Mapping, frame: Frame) -> tuple[list[Sample], float]:
    """Samples of the task, and the score expected of a reader that names as many variables, whichever.

    The floor is one chain's share of all variables; 0 where there is only one chain.

    Raises
    ------
    InvalidInput
        The length does not hold example, chains and noise; the answer does not fit into `answer_tokens`.
    """
    samples = [_sample(settings, frame, index) for index in range(settings["samples"])]
    return samples, 1 / settings["chains"] if settings["chains"] > 1 else 0.0


def draw_chains(rng: np.random.Generator, chains: int, hops: int, letters: int) -> list[Chain]:
    """Chains of `hops` + 1 variables, all names and values distinct."""
    names = [name.upper() for name in draw_letters(rng, letters, chains * (hops + 1))]
    values = LOW + rng.permutation(HIGH - LOW)[:chains]
    return [
        Chain(str(value), tuple(names[place * (hops + 1) : (place + 1) * (hops + 1)]))
        for place, value in enumerate(values)
    ]


def question_text(chain: Chain) -> tuple[str, str]:
    """The question for a chain, and the beginning of its answer."""
    return (
        f"\nQuestion: Find all variables that are assigned the value {chain.value} in the text above.",
        f"Answer: According to the chains of variable assignments in the text above, {len(chain.names)} variables "
        f"are assigned the value {chain.value}, they are:",
    )


def _sample(settings: Mapping, frame: Frame, index: int) -> Sample:
    rng = np.random.default_rng([settings["seed"], index])
    count, hops = settings["chains"], settings["hops"]
    chains = draw_chains(rng, count, hops, LETTERS)
    draws = _draws(rng, chains)
    head = _example(rng, settings) + HEAD
    question = question_text(chains[0])
    ids = frame.question(*question)
    tokens = settings["length"] - settings["answer_tokens"] - len(ids)
    needles = [
        Needle(line, place, 0, len(line), line=True) for place, chain in enumerate(chains) for line in chain.lines
    ]
    hay, places = noise(max(0, tokens) * SLOT), among_lines(np.concatenate(draws))
    name = settings["name"]
    try:
        hidden = hide(frame, head, hay, LINE, needles, places, tokens, name, least=len(needles))
    except InvalidInput:
        # too few lines of noise for one in front of each assignment: sentences of it, as RULER does
        hidden = hide(frame, head, hay, SENTENCE, needles, places, tokens, name, least=len(needles))
    gold = frame.gold(*question, " " + " ".join(chains[0].names))
    if len(gold) > settings["answer_tokens"]:
        raise refused(name, "answer_tokens", f"expected at least the {len(gold)} tokens of an answer")
    asked = Question(ids, list(chains[0].names), gold, sorted(hidden.positions[0]))
    drawn = {"chains": [{"value": chain.value, "names": list(chain.names)} for chain in chains]}
    return Sample(index, settings["seed"], hidden.ids, [asked], {**drawn, "depths": np.concatenate(draws).tolist()})


def _draws(rng: np.random.Generator, chains: Sequence[Chain]) -> list[np.ndarray]:
    """Where the lines of each chain stand, in [0, 1): each chain in its order, independent of the others."""
    return [np.sort(rng.random(len(chain.names))) for chain in chains]


def _example(rng: np.random.Generator, settings: Mapping) -> str:
    """A short task of the same chains and hops with its answer."""
    chains = draw_chains(rng, settings["chains"], settings["hops"], EXAMPLE_LETTERS)
    lines = SHORT_EXAMPLE_NOISE if settings["length"] < LONG else EXAMPLE_NOISE
    sentences = [f"{sentence}." for sentence in NOISE.rstrip(".").split(". ")] * lines
    draws = np.concatenate(_draws(rng, chains))
    places = among_lines(draws)(len(sentences))
    hidden = [line for chain in chains for line in chain.lines]
    text = ""
    for place, sentence in enumerate([*sentences, ""]):
        text += "".join(f"{hidden[order]}\n" for order in np.argsort(draws) if places[order] == place)
        text += f"{sentence}\n" if sentence else ""
    question, prefix = question_text(chains[0])
    return f"{HEAD}{text}{question.lstrip()}\n{prefix} {' '.join(chains[0].names)}\n\n"
