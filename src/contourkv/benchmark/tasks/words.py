"""Keys and values that tasks hide: nouns, adjectives, numbers, UUIDs, variable names, coded words."""

from __future__ import annotations

import uuid

import numpy as np

NOUNS = tuple(
    """
    anchor apron badge bakery balloon banjo barrel basket beacon bell bench bicycle blanket bottle bracelet
    bridge broom bucket button cabin cactus camera candle canoe canyon carpet castle cathedral ceiling chimney clock
    cloud coat comet compass cottage cradle curtain cushion desert diary door drawer drum easel elbow engine envelope
    falcon feather fence ferry fiddle flute forest fountain garden glacier glove goblet guitar hammer hammock harbor
    helmet hinge horizon igloo island jacket jar jungle kettle keyboard kite ladder lagoon lamp lantern lemon letter
    library lighthouse lizard locket magnet mailbox mantle marble meadow mirror mitten monastery mosaic mountain mug
    napkin necklace needle notebook oasis ocean orchard otter oven paddle palace parade parrot pasture pencil penguin
    piano pigeon pillow planet plaza pocket prairie pumpkin puzzle quarry quilt raft railway ribbon river rocket roof
    saddle sailboat sandal satchel scarf school shovel skeleton sparrow spoon staircase statue suitcase telescope
    temple tent theater thimble tower tractor trumpet tunnel turtle umbrella valley vase village violin volcano wagon
    wallet waterfall whistle willow window workshop yacht zeppelin
    """.split()
)
ADJECTIVES = tuple(
    """
    ancient bitter blunt bold brave brief bright brisk calm careful cheerful clever clumsy coarse common crisp crooked
    curious damp daring dense distant drowsy dusty eager early elegant empty faint famous fancy fearless fierce flimsy
    fluffy fragile frozen gentle giant glossy graceful grateful grumpy handsome harsh hasty heavy hollow honest humble
    hungry idle jolly keen lazy likely lively lonely loyal lucky massive mellow mighty misty modern modest
    muddy narrow nervous nimble noble noisy odd pale patient peaceful playful polite proud quick quiet rapid rare
    restless robust rough royal rusty secret shallow sharp shiny silent simple sleepy slender slippery smooth sour
    spicy stormy strange sturdy subtle sudden tidy tiny tough vague vast vivid wise witty wooden young
    """.split()
)
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
DIGITS = 7


def draw_words(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct words: single ones first, adjective-noun pairs where more are needed; fewer where there are no more."""
    single = NOUNS + ADJECTIVES
    words = [single[place] for place in rng.permutation(len(single))]
    return words[:count] if count <= len(words) else words + draw_pairs(rng, count - len(words))


def draw_pairs(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct adjective-noun pairs, all of them where more are asked for."""
    places = rng.permutation(len(ADJECTIVES) * len(NOUNS))[:count]
    return [f"{ADJECTIVES[place // len(NOUNS)]}-{NOUNS[place % len(NOUNS)]}" for place in places]


def draw_keys(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    """Distinct keys: "noun", "adjective_noun" or "uuid"."""
    if kind == "noun":
        return [NOUNS[place] for place in rng.permutation(len(NOUNS))[:count]]
    return draw_pairs(rng, count) if kind == "adjective_noun" else draw_values(rng, "uuid", count)


def draw_values(rng: np.random.Generator, kind: str, count: int) -> list[str]:
    """Distinct values: "number" of 7 digits, or "uuid" (version 4)."""
    return _distinct(count, lambda: _number(rng) if kind == "number" else _uuid(rng))


def draw_letters(rng: np.random.Generator, size: int, count: int) -> list[str]:
    """Distinct strings of `size` lower-case letters."""
    return _distinct(count, lambda: "".join(rng.choice(LETTERS, size)))


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS))


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _distinct(count: int, draw) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)
