"""What `contourkv.ragged.attend` is given, drawn at random, and the float64 loop over heads and rows it must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

import torch
from hypothesis import strategies as st

from contourkv.ragged.attention import Contents, attend

# Largest error, over values of unit size: float32 sums; half precision rounds the output (2^-8, 2^-11) and, in
# PyTorch's fused kernel, the weights.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Layer:
    """What `attend` is given."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    tail_length: int
    tail_first: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    tail_visible: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> Layer:
        floats = ("query", "keys", "values", "tail_keys", "tail_values")
        return replace(self, **{name: getattr(self, name).to(dtype) for name in floats})

    def contents(self) -> Contents:
        """What the ways of attention are given beside the query, after the checks of `attend`."""
        held = Contents(**{field.name: getattr(self, field.name) for field in fields(Contents)})
        held.check(self.query, self.sinks)
        return held

    def unshared(self) -> Layer:
        """The same for two sequences that share their runs, with a copy of the entries for each."""
        used = int(self.end.max())
        return replace(
            self,
            keys=self.keys[:used].repeat(2, 1),
            values=self.values[:used].repeat(2, 1),
            positions=self.positions[:used].repeat(2),
            begin=self.begin + torch.tensor([[0], [used]]),
            end=self.end + torch.tensor([[0], [used]]),
        )

    def attend(self) -> torch.Tensor:
        arguments = dict(vars(self))
        named = {name: arguments.pop(name) for name in ("scaling", "window", "softcap", "sinks", "tail_visible")}
        return attend(*arguments.values(), **named)


def rows_by_definition(layer: Layer) -> Iterator[tuple[tuple[int, int, int, int], torch.Tensor, torch.Tensor]]:
    """Entry by entry in float64: ((sequence, query head, KV head, row), weights, values) over run, then tail."""
    layer = layer.to(torch.float64)
    sequences, query_heads, rows, _ = layer.query.shape
    group = query_heads // layer.begin.shape[1]
    for b, head, row in product(range(sequences), range(query_heads), range(rows)):
        h = head // group
        run = slice(int(layer.begin[b, h]), int(layer.end[b, h]))
        keys = torch.cat([layer.keys[run], layer.tail_keys[b, h, : layer.tail_length]])
        values = torch.cat([layer.values[run], layer.tail_values[b, h, : layer.tail_length]])
        positions = torch.cat([layer.positions[run].long(), layer.tail_first + torch.arange(layer.tail_length)])
        at = layer.tail_first + layer.tail_length - rows + row
        seen = positions <= at
        if layer.window is not None:
            seen &= positions > at - layer.window
        if layer.tail_visible is not None:
            seen[len(seen) - layer.tail_length :] &= layer.tail_visible[b, : layer.tail_length]
        z = layer.scaling * keys[seen] @ layer.query[b, head, row]
        if layer.softcap is not None:
            z = layer.softcap * torch.tanh(z / layer.softcap)
        if layer.sinks is not None:
            z = torch.cat([z, layer.sinks[head].double().view(1)])
        weights = torch.zeros(len(seen), dtype=torch.float64)
        if len(z):
            weights[seen] = z.softmax(0)[: int(seen.sum())]
        yield (b, head, h, row), weights, values


def oracle(layer: Layer) -> torch.Tensor:
    output = torch.zeros(*layer.query.shape[:3], layer.values.shape[1], dtype=torch.float64)
    for (b, head, _, row), weights, values in rows_by_definition(layer):
        output[b, head, row] = weights @ values
    return output


def random_layer(
    seed: int,
    lengths: list[list[int]],
    group: int = 2,
    rows: int = 1,
    tail: int | None = None,
    size: int = 16,
    value_size: int | None = None,
    slack: int = 3,
    aliased: bool = False,
    **options: object,
) -> Layer:
    """Gaussian keys and values; `lengths` entries in the run of each sequence and head, `tail` slots, Q `rows`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = torch.tensor(lengths)
    sequences, heads = counts.shape
    tail = rows if tail is None else max(tail, rows)
    value_size = size if value_size is None else value_size
    longest = 2 * int(counts.max()) + 1
    runs = [torch.randperm(longest, generator=generator)[:n].sort().values for n in counts.flatten().tolist()]
    end = counts.flatten().cumsum(0).view(sequences, heads)
    begin = end - counts
    if aliased:
        begin, end = begin[:1].repeat(sequences, 1), end[:1].repeat(sequences, 1)
    capacity = tail + slack
    if options.pop("sinks", False):
        options["sinks"] = normal(heads * group).float()
    padded = options.pop("padded", False)
    if padded:
        visible = torch.rand(sequences, capacity, generator=generator) < 0.6
        options["tail_visible"] = visible
    return Layer(
        # the strides that a model's transpose leaves
        query=normal(sequences, rows, heads * group, size).transpose(1, 2),
        keys=normal(int(counts.sum()), size),
        values=normal(int(counts.sum()), value_size),
        positions=torch.cat(runs).to(torch.int32),
        begin=begin,
        end=end,
        tail_keys=normal(sequences, heads, capacity, size),
        tail_values=normal(sequences, heads, capacity, value_size),
        tail_length=tail,
        tail_first=longest,
        scaling=size**-0.5,
        **options,
    )


@st.composite
def layers(draw, most_rows: int = 5, most_heads: int = 3, **fixed: object) -> Layer:
    sequences, heads = draw(st.integers(1, most_heads)), draw(st.integers(1, most_heads))
    run = st.one_of(st.integers(0, 9), st.integers(0, 400))
    row = st.lists(run, min_size=heads, max_size=heads)
    lengths = draw(st.lists(row, min_size=sequences, max_size=sequences))
    if draw(st.booleans()):
        lengths = [[lengths[0][0]] * heads] * sequences
    size = draw(st.sampled_from([8, 16, 64, 80]))
    chosen = {
        "group": draw(st.sampled_from([1, 2, 3, 4, 7])),
        "rows": draw(st.integers(1, most_rows)),
        "tail": draw(st.integers(0, 40)),
        "size": size,
        "value_size": draw(st.sampled_from([size, size, 8, 24])),
        "slack": draw(st.integers(0, 5)),
        "aliased": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, 1, 5, 60])),
        "softcap": draw(st.sampled_from([None, None, 2.0])),
        "sinks": draw(st.booleans()),
        "padded": draw(st.booleans()),
    }
    return random_layer(draw(st.integers(0, 2**31)), lengths, **{**chosen, **fixed})


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    assert (found.double() - expected.double()).abs().max() <= TOLERANCE[dtype]
