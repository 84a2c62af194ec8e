"""The ragged cache against its peers: decode step, append, bytes held, allocation, and generation end to end.

    python benchmarks/ragged.py decode                 one layer's attention for one new token, a quarter kept
    python benchmarks/ragged.py append                 one more token in every KV head of one layer
    python benchmarks/ragged.py held                   bytes held by a cache of which a quarter is kept
    python benchmarks/ragged.py allocation             dividing the budget, against the prefill's dense attention
    python benchmarks/ragged.py generate MODEL         tokens a second over one context, a quarter kept

All sides run in one process, in rounds that alternate between them; printed are the median, the 10th and 90th
percentile and the ratio of medians to the row marked 1.00. On a machine that others use too, a side that waits for two
OpenMP threads at once measures the others: set OMP_WAIT_POLICY=passive there, for all sides, or --threads 1; `quiet`,
the ratio of the 10th percentiles, stands beside the ratio of medians for the same reason.

Decode and append: 8 KV heads of 4 query heads, head_dim 128, lengths lognormal with a mean of 1,024 of 4,096 entries.
As many layers stand ready as exceed the processor's cache, and each round goes through all of them, as a model does;
`--layers 1` times one layer again and again instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from contourkv.allocator import Problem, allocate, weighted
from contourkv.held import held_bytes
from contourkv.press.observation import value_distances, window_masses
from contourkv.provenance import write_json
from contourkv.ragged import RaggedCache, RaggedLayer

HEADS, GROUP, SIZE, FULL, KEPT = 8, 4, 128, 4096, 1024
SCALING = SIZE**-0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BEYOND_CACHE = 96 * 2**20  # bytes that no processor cache here holds


# ---------------------------------------------------------------------- timing and printing


def timed(sides: dict[str, Callable[[int], object]], turns: int, rounds: int) -> dict[str, np.ndarray]:
    """Seconds of every call side(turn), turn 0 .. turns-1, over `rounds` rounds; the first round is not counted."""
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for count in range(rounds + 1):
        for name, side in sides.items():
            for turn in range(turns):
                began = perf_counter()
                side(turn)
                if count:
                    seen[name].append(perf_counter() - began)
    return {name: np.array(times) for name, times in seen.items()}


def table(title: str, seen: dict[str, np.ndarray], base: str, unit: float = 1e-3, name: str = "ms") -> list[dict]:
    """Print one row a side; the same rows as dictionaries, times in seconds."""
    print(f"\n{title}")
    print(f"  {'':<44}{f'median {name}':>12}{'p10':>10}{'p90':>10}{'ratio':>8}{'quiet':>8}")
    rows = []
    for side, times in seen.items():
        low, middle, high = np.percentile(times, [10, 50, 90])
        ratio = middle / np.median(seen[base])
        quiet = low / np.percentile(seen[base], 10)
        print(
            f"  {side:<44}{middle / unit:>12.3f}{low / unit:>10.3f}{high / unit:>10.3f}{ratio:>8.3f}{quiet:>8.3f}",
            flush=True,
        )
        row = {"table": title, "side": side, "median": middle, "p10": low, "p90": high, "ratio": ratio, "quiet": quiet}
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- one layer, a quarter kept


def lognormal_lengths(seed: int) -> np.ndarray:
    """Lengths of the KV heads: lognormal, at most FULL, HEADS * KEPT in all."""
    weights = np.random.default_rng(seed).lognormal(0.0, 0.6, HEADS)
    lengths = np.minimum(weights / weights.sum() * HEADS * KEPT, FULL).astype(int)
    lengths[np.argmin(lengths)] += HEADS * KEPT - lengths.sum()
    return lengths


class Kept:
    """One layer of which a quarter is kept, in the forms that the sides want; the full one beside it."""

    def __init__(self, lengths: np.ndarray, dtype: torch.dtype, generator: torch.Generator) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.full = normal(1, HEADS, FULL, SIZE), normal(1, HEADS, FULL, SIZE)
        keep = torch.zeros(1, HEADS, FULL, dtype=torch.bool)
        for head, length in enumerate(lengths):
            keep[0, head, torch.randperm(FULL, generator=generator)[:length]] = True
        self.layer = RaggedLayer(0)
        self.layer.take(*self.full, keep, FULL)
        self.new = normal(1, HEADS, 1, SIZE), normal(1, HEADS, 1, SIZE)
        # A token is in the tail already when attention runs; the other sides leave it out, which is in their favour.
        self.layer.update(*self.new)
        self.runs = list(zip(self.layer.begin[0].tolist(), self.layer.end[0].tolist(), strict=True))
        self.flat = self.layer.frozen_keys, self.layer.frozen_values
        self.padded, self.pages = None, {}

    def pad(self) -> None:
        longest = max(last - first for first, last in self.runs)
        self.padded = tuple(flat.new_zeros(1, HEADS, longest, SIZE) for flat in self.flat)
        self.mask = torch.zeros(1, HEADS, 1, longest, dtype=torch.bool)
        for head, (first, last) in enumerate(self.runs):
            self.mask[0, head, :, : last - first] = True
            for padded, flat in zip(self.padded, self.flat, strict=True):
                padded[0, head, : last - first] = flat[first:last]

    def page(self, size: int) -> None:
        owner, fill, parts = [], [], ([], [])
        for head, (first, last) in enumerate(self.runs):
            for at in range(first, last, size):
                owner.append(head)
                fill.append(min(size, last - at))
                for part, flat in zip(parts, self.flat, strict=True):
                    page = flat.new_zeros(size, SIZE)
                    page[: fill[-1]] = flat[at : at + fill[-1]]
                    part.append(page)
        # Full pages first: they need no mask.
        order = sorted(range(len(owner)), key=lambda index: fill[index] < size)
        whole = sum(filled == size for filled in fill)
        keys, values = (torch.stack([part[index] for index in order]).unsqueeze(1) for part in parts)
        seen = torch.arange(size) < torch.tensor([fill[index] for index in order])[:, None]
        mask = torch.zeros(seen.shape, dtype=keys.dtype).masked_fill(~seen, float("-inf"))
        self.pages[size] = torch.tensor([owner[index] for index in order]), whole, keys, values, mask[:, None, None]

    def by_pages(self, query: torch.Tensor, size: int) -> torch.Tensor:
        """Pages as one batch of the fused kernel, joined by their log-sum-exp."""
        owner, whole, keys, values, mask = self.pages[size]
        asked = query[0].index_select(0, owner).unsqueeze(1)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = [flash(asked[:whole], keys[:whole], values[:whole], scale=SCALING)]
        if whole < len(owner):
            found.append(flash(asked[whole:], keys[whole:], values[whole:], attn_mask=mask[whole:], scale=SCALING))
        output = torch.cat([part for part, _ in found])[:, 0].float()
        level = torch.cat([part for _, part in found])[:, 0]
        top = level.new_full((HEADS, GROUP), -torch.inf).index_reduce_(0, owner, level, "amax")
        weight = (level - top[owner]).exp()
        total = torch.zeros(HEADS, GROUP).index_add_(0, owner, weight)
        joined = torch.zeros(HEADS, GROUP, SIZE).index_add_(0, owner, weight.unsqueeze(-1) * output)
        return (joined / total.unsqueeze(-1)).to(query.dtype).unsqueeze(0)

    def by_head(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [
                scaled_dot_product_attention(
                    query[:, head : head + 1], *(flat[None, None, first:last] for flat in self.flat), scale=SCALING
                )
                for head, (first, last) in enumerate(self.runs)
            ],
            dim=1,
        )

    def by_padding(self, query: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(query, *self.padded, attn_mask=self.mask, scale=SCALING)

    def dense(self, query: torch.Tensor) -> torch.Tensor:
        """The group folded into the query's length: the fast way."""
        return scaled_dot_product_attention(query, *self.full, scale=SCALING)

    def ours(self, query: torch.Tensor) -> torch.Tensor:
        return self.layer.attend(query, scaling=SCALING)

    def read(self) -> float:
        """Every byte of the kept keys and values, once."""
        return sum(float(flat.view(torch.float32).sum()) for flat in self.flat)


def decode(asked: argparse.Namespace) -> list[dict]:
    lengths, rows = lognormal_lengths(asked.seed), []
    print(f"lengths {lengths.tolist()}, {asked.threads} threads, 1 sequence")
    for name in asked.dtypes:
        dtype = DTYPES[name]
        generator = torch.Generator().manual_seed(asked.seed)
        layers = asked.layers or -(-BEYOND_CACHE // (2 * HEADS * KEPT * SIZE * dtype.itemsize))
        kept = [Kept(lengths, dtype, generator) for _ in range(layers)]
        for layer in kept:
            layer.pad()
            for size in asked.pages:
                layer.page(size)
        folded = torch.randn(1, HEADS, GROUP, SIZE, generator=generator).to(dtype)
        query = folded.view(1, HEADS * GROUP, 1, SIZE)
        check(kept[0], folded, query, asked.pages)
        seen = timed(decode_sides(kept, folded, query, asked.pages), layers, asked.rounds)
        title = f"decode step, {name}, {layers} layers in turn"
        rows += table(title, seen, "dense SDPA over all 4,096")
    return rows


def decode_sides(
    kept: list[Kept], folded: torch.Tensor, query: torch.Tensor, pages: list[int]
) -> dict[str, Callable[[int], object]]:
    sides = {
        "dense SDPA over all 4,096": lambda turn: kept[turn].dense(folded),
        "padded + mask, SDPA": lambda turn: kept[turn].by_padding(folded),
        "loop over heads, SDPA": lambda turn: kept[turn].by_head(folded),
    }
    for size in pages:
        sides[f"pages of {size}, SDPA, log-sum-exp"] = lambda turn, size=size: kept[turn].by_pages(folded, size)
    sides["contourkv attend"] = lambda turn: kept[turn].ours(query)
    sides["reading the kept bytes (sum)"] = lambda turn: kept[turn].read()
    return sides


def check(kept: Kept, folded: torch.Tensor, query: torch.Tensor, sizes: list[int]) -> None:
    """All sides compute the same."""
    expected = kept.by_head(folded).float()
    tolerance = 1e-5 if folded.dtype == torch.float32 else 2e-2
    # Without the appended token, which only ours sees.
    layer = kept.layer
    hidden = torch.zeros(1, layer.tail_keys.shape[2], dtype=torch.bool)
    ours = layer.attend(query, scaling=SCALING, tail_visible=hidden)
    found = [kept.by_padding(folded), ours.view_as(folded), *(kept.by_pages(folded, size) for size in sizes)]
    for output in found:
        if (output.float() - expected).abs().max() > tolerance:
            raise SystemExit("two sides of the decode step differ")


# ---------------------------------------------------------------------- append


def append(asked: argparse.Namespace) -> list[dict]:
    lengths, rows = lognormal_lengths(asked.seed), []
    for name in asked.dtypes:
        dtype = DTYPES[name]
        generator = torch.Generator().manual_seed(asked.seed)
        layers = asked.layers or -(-BEYOND_CACHE // (2 * HEADS * KEPT * SIZE * dtype.itemsize))
        kept = [Kept(lengths, dtype, generator) for _ in range(layers)]

        def rebuild(turn: int, kept: list[Kept] = kept) -> None:
            """A new flat buffer with one entry more at the end of each run, as KVzip and AdaKV do."""
            layer = kept[turn]
            for flat, new in zip(layer.flat, layer.new, strict=True):
                parts = []
                for head, (first, last) in enumerate(layer.runs):
                    parts += [flat[first:last], new[0, head]]
                torch.cat(parts)

        def concatenate(turn: int, kept: list[Kept] = kept) -> None:
            """A dense cache of the full length grown by one, as transformers' DynamicCache does."""
            layer = kept[turn]
            for full, new in zip(layer.full, layer.new, strict=True):
                torch.cat([full, new], dim=2)

        def slot(turn: int, kept: list[Kept] = kept) -> None:
            layer = kept[turn].layer
            layer.tail_keys[:, :, layer.tail_length - 1 : layer.tail_length] = kept[turn].new[0]
            layer.tail_values[:, :, layer.tail_length - 1 : layer.tail_length] = kept[turn].new[1]

        sides = {
            "rebuild the flat buffer": rebuild,
            "dense cache, torch.cat": concatenate,
            "contourkv RaggedLayer.update": lambda turn, kept=kept: kept[turn].layer.update(*kept[turn].new),
            "the write alone, key and value": slot,
        }
        title = f"append one token to a layer, {name}, {layers} layers in turn"
        rows += table(title, timed(sides, layers, asked.rounds), "rebuild the flat buffer")
    return rows


# ---------------------------------------------------------------------- bytes held


def held(asked: argparse.Namespace) -> list[dict]:
    from transformers import LlamaConfig

    rows = []
    print(f"\n{'held bytes at a quarter of ' + format(FULL, ',') + ' tokens':<58}{'MiB':>9}{'of nominal':>12}")
    for name in asked.dtypes:
        dtype = DTYPES[name]
        config = LlamaConfig(
            num_hidden_layers=asked.held_layers,
            num_attention_heads=HEADS * GROUP,
            num_key_value_heads=HEADS,
            head_dim=SIZE,
            hidden_size=HEADS * GROUP * SIZE,
        )
        generator = torch.Generator().manual_seed(asked.seed)
        for mean in asked.means:
            tokens = FULL * mean // KEPT
            cache = RaggedCache(config)
            for index in range(asked.held_layers):
                weights = np.random.default_rng([asked.seed, index]).lognormal(0.0, 0.6, HEADS)
                lengths = np.minimum(weights / weights.sum() * HEADS * mean, tokens).astype(int)
                lengths[np.argmin(lengths)] += HEADS * mean - lengths.sum()
                keep = torch.zeros(1, HEADS, tokens, dtype=torch.bool)
                for head, length in enumerate(lengths):
                    keep[0, head, torch.randperm(tokens, generator=generator)[:length]] = True
                keys, values = (torch.zeros(1, HEADS, tokens, SIZE, dtype=dtype) for _ in range(2))
                cache.take(index, keys, values, keep, tokens)
                del keys, values
            cache.mark()
            for state, appended in (("compressed", 0), ("32 tokens later", 32)):
                for layer in cache.layers:
                    for _ in range(appended):
                        layer.update(*(torch.zeros(1, HEADS, 1, SIZE, dtype=dtype) for _ in range(2)))
                nominal = asked.held_layers * HEADS * (mean + appended) * 2 * SIZE * dtype.itemsize
                bytes_held = held_bytes(cache)
                side = f"{name}, mean {mean} entries a head, {state}"
                print(f"  {side:<56}{bytes_held.total / 2**20:>9.2f}{bytes_held.total / nominal:>12.4f}")
                rows.append(
                    {
                        "table": "held",
                        "side": side,
                        "nominal": nominal,
                        "payload": bytes_held.payload,
                        "slack": bytes_held.slack,
                        "metadata": bytes_held.metadata,
                        "ratio": bytes_held.total / nominal,
                    }
                )
    return rows


# ---------------------------------------------------------------------- allocation


def allocation(asked: argparse.Namespace) -> list[dict]:
    """Per layer: dense causal attention of the prefill, what the press observes, and the division of the budget."""
    rows, layers = [], asked.allocation_layers
    dtype = torch.float32
    for tokens in asked.tokens:
        generator = torch.Generator().manual_seed(asked.seed)
        query = torch.randn(1, HEADS * GROUP, tokens, SIZE, generator=generator, dtype=dtype)
        key, value = (torch.randn(1, HEADS, tokens, SIZE, generator=generator, dtype=dtype) for _ in range(2))
        repeated = [part.repeat_interleave(GROUP, dim=1) for part in (key, value)]
        scores = [torch.rand(HEADS, tokens, generator=generator) ** 8 for _ in range(layers)]
        masses = [torch.rand(HEADS, tokens, generator=generator) ** 8 for _ in range(layers)]
        distances = torch.rand(HEADS, tokens, generator=generator)
        cost = 2 * SIZE * dtype.itemsize + 4
        budget = layers * HEADS * tokens * cost // 4

        def divide(
            _: int, scores: list = scores, masses: list = masses, distances: torch.Tensor = distances,
            cost: int = cost, budget: int = budget,
        ) -> None:  # fmt: skip
            worth = tuple(weighted(mass, distances, "distance") for mass in masses)
            allocate(Problem(tuple(scores), worth, (cost,) * layers, budget))

        def observe(_: int, query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> None:
            value_distances(window_masses(query, key, rows=64, scaling=SCALING).mean, value)

        def dense(_: int, query: torch.Tensor = query, repeated: list = repeated) -> None:
            scaled_dot_product_attention(query, *repeated, is_causal=True, scale=SCALING)

        rounds = max(3, min(asked.rounds, 2**16 // tokens))
        names = (
            "dense causal SDPA of the prefill",
            "observation of the last 64 rows",
            "allocation (all layers / layers)",
        )
        seen = timed(dict(zip(names, (dense, observe, divide), strict=True)), 1, rounds)
        seen[names[2]] /= layers
        rows += table(f"{tokens:,} tokens, per layer, {layers} layers of 8 x 4 heads, float32", seen, names[0])
    return rows


# ---------------------------------------------------------------------- end to end


def generate(asked: argparse.Namespace) -> list[dict]:
    """Greedy tokens one at a time over one context, the caches side by side, a quarter kept in all but the first."""
    import yaml
    from kvpress import AdaKVPress, KVzipPress, SnapKVPress
    from transformers import DynamicCache

    from contourkv import ContourKVPress
    from contourkv.contexts import build_contexts
    from contourkv.models import load_model

    root = Path(__file__).resolve().parents[1]
    model = load_model(asked.model, dtype=asked.dtype)
    texts = yaml.safe_load((root / "config/texts.yaml").read_text(encoding="utf-8"))["text_sources"]
    (context,) = build_contexts(
        asked.model, "prose", texts["prose"], str(root / "resources/wheels"), asked.context, 1, asked.seed
    )
    ids = torch.tensor([list(context.ids)])
    presses = {
        "full DynamicCache": None,
        "kvpress SnapKV (uniform, frees)": SnapKVPress(0.75),
        "kvpress AdaKV(SnapKV) (mask)": AdaKVPress(SnapKVPress(0.75)),
        "kvpress KVzip (mask)": KVzipPress(0.75),
        "ContourKVPress(0.25)": ContourKVPress(0.25),
    }
    caches, marks = {}, {}
    with torch.no_grad():
        for name, press in presses.items():
            cache = RaggedCache(model.config) if isinstance(press, ContourKVPress) else DynamicCache()
            began = perf_counter()
            with nullcontext() if press is None else press(model):
                model(ids, past_key_values=cache, logits_to_keep=1)
            bytes_held = held_bytes(cache, model)
            print(f"{name}: prefill {perf_counter() - began:.1f} s, holds {bytes_held}", flush=True)
            caches[name] = cache, cache.get_seq_length()
            # kvpress keeps its masks on the attention modules.
            marks[name] = {
                module: module.masked_key_indices
                for module in model.modules()
                if getattr(module, "masked_key_indices", None) is not None
            }
            for module in marks[name]:
                module.masked_key_indices = None

        def step(name: str, token: torch.Tensor, position: int) -> torch.Tensor:
            cache, _ = caches[name]
            for module, indices in marks[name].items():
                module.masked_key_indices = indices
            logits = model(token, past_key_values=cache, position_ids=torch.tensor([[position]])).logits
            for module in marks[name]:
                module.masked_key_indices = None
            return logits[:, -1:].argmax(-1)

        def rewind(name: str) -> None:
            cache, length = caches[name]
            if isinstance(cache, RaggedCache):
                cache.rollback()
            else:
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

        seen: dict[str, list[float]] = {name: [] for name in presses}
        for count in range(asked.rounds + 1):
            for name in presses:
                token = ids[:, -1:]
                for offset in range(asked.new):
                    began = perf_counter()
                    token = step(name, token, asked.context + offset)
                    if count:
                        seen[name].append(perf_counter() - began)
                rewind(name)
    title = f"one token over {asked.context:,} tokens, {Path(asked.model).name}, {asked.dtype}, a quarter kept"
    rows = table(title, {name: np.array(times) for name, times in seen.items()}, "full DynamicCache")
    print("\n  tokens a second, by the median: " + ", ".join(f"{r['side']} {1 / r['median']:.1f}" for r in rows))
    return rows


# ----------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["decode", "append", "held", "allocation", "generate"])
    parser.add_argument("model", nargs="?", help="generate: folder of a prepared model")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="decode, append, held")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="generate: of the model")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, help="decode, append: layers in turn; default: more than fit a cache")
    parser.add_argument("--pages", type=int, nargs="+", default=[64, 128], help="decode: page sizes")
    parser.add_argument("--held-layers", type=int, default=8)
    parser.add_argument("--means", type=int, nargs="+", default=[512, 1024], help="held: entries a head")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="allocation")
    parser.add_argument("--allocation-layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096, help="generate: tokens of context")
    parser.add_argument("--new", type=int, default=32, help="generate: tokens a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the rows to this file")
    asked = parser.parse_args()
    if asked.what == "generate" and not asked.model:
        parser.error("generate: give the folder of a prepared model")
    torch.set_num_threads(asked.threads)
    rows = globals()[asked.what](asked)
    if asked.json:
        write_json(asked.json, {"arguments": {k: str(v) for k, v in vars(asked).items()}, "rows": rows})


if __name__ == "__main__":
    main()
