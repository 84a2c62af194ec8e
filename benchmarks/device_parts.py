"""What `benchmarks/device.py` checks and times beside attention: steps, eviction, allocation, enumeration, capture."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import comb
from time import perf_counter

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from contourkv import Instance, held_bytes
from contourkv.allocator import Contour, Problem
from contourkv.capture import capture_rows
from contourkv.enumeration import best_of_all
from contourkv.enumeration.batched import best_in_batch, search_together
from contourkv.enumeration.pool import MassPool, Neighbourhood, RankedRow
from contourkv.ragged import RaggedCache, RaggedLayer, Steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def no_waiting() -> Iterator[None]:
    """PyTorch raises where the host would wait for the GPU."""
    if DEVICE == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def seconds(call: Callable[[], object], times: int) -> list[float]:
    """Of each call, the device's work included, after one that is not counted."""
    call()
    found = []
    for _ in range(times):
        wait()
        began = perf_counter()
        call()
        wait()
        found.append(perf_counter() - began)
    return found


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def said(row: dict) -> dict:
    """Print a row as it comes."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if k != "passed"}
    mark = {True: "  ok", False: "  FAIL", None: ""}[row.get("passed")]
    print("  " + ", ".join(f"{key} {value}" for key, value in shown.items()) + mark, flush=True)
    return row


def model_of(dry: bool, layers: int) -> LlamaForCausalLM:
    """A random Llama in bfloat16, 32 query and 8 KV heads of 128; tiny and in float32 when dry."""
    size = (
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
        if dry
        else {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 4096}
    )
    config = LlamaConfig(vocab_size=256, num_hidden_layers=layers, max_position_embeddings=65536, **size)
    torch.manual_seed(5)
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(torch.float32 if dry else torch.bfloat16).eval()


@torch.no_grad()
def steps(dry: bool) -> list[dict]:
    """A model's decode step: without a wait, as one graph, the same as fed by hand, and how much faster."""
    context, room, layers = (24, 6, 2) if dry else (4096, 64, 8)
    model = model_of(dry, layers)
    ids = torch.randint(256, (1, context + room), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(6))

    def filled() -> RaggedCache:
        cache = RaggedCache(model.config)
        model(ids[:, :context], past_key_values=cache)
        generator = torch.Generator(DEVICE).manual_seed(7)
        for index, layer in enumerate(cache.layers):
            keep = torch.rand(*layer.begin.shape, context, device=DEVICE, generator=generator) < 0.25
            cache.evict(index, keep)
        cache.mark()
        return cache

    def by_hand(cache: RaggedCache) -> list[torch.Tensor]:
        at = torch.arange(context, context + room, device=DEVICE)
        return [
            model(ids[:, place : place + 1], past_key_values=cache, position_ids=at[None, n : n + 1]).logits
            for n, place in enumerate(range(context, context + room))
        ]

    rows = []
    cache = filled()
    by_hand(cache)  # runs are copied to the GPU, kernels compiled, the tail allocated
    cache.rollback()
    with no_waiting():
        expected = by_hand(cache)
    rows.append(said({"name": "decode steps without a wait", "steps": room, "passed": True}))
    cache.rollback()
    with Steps(model, cache, room=room) as step:
        step(ids[:, context : context + 1])
        with no_waiting():
            got = [step(ids[:, n : n + 1]).clone() for n in range(context + 1, context + room)]
    worst = max(float((a - b).abs().max()) for a, b in zip(got, expected[1:], strict=True))
    scale = float(torch.stack(expected).abs().max())
    rows.append(said({"name": "Steps give what the model gives", "error": worst, "passed": worst <= 0.02 * scale}))
    cache.rollback()
    plain = statistics.median(seconds(lambda: (cache.rollback(), by_hand(cache)), 3)) / room
    cache.rollback()
    with Steps(model, cache, room=room * 5) as step:
        token = ids[:, :1]
        graph = statistics.median(seconds(lambda: [step(token) for _ in range(room)], 3)) / room
    rows.append(
        said({"name": "decode step", "layers": layers, "by hand, us": 1e6 * plain, "as a graph, us": 1e6 * graph})
    )
    return rows


def evict(dry: bool) -> list[dict]:
    """Compaction gives memory back to the allocator, layer by layer, and needs no more than one layer on the way."""
    heads, tokens, size, count = (2, 40, 8, 3) if dry else (8, 32768, 128, 8)
    dtype = torch.float32 if dry else torch.bfloat16
    layers = []
    for index in range(count):
        layer = RaggedLayer(index)
        layer.update(*(torch.randn(1, heads, tokens, size, device=DEVICE, dtype=dtype) for _ in range(2)))
        layers.append(layer)
    whole = held_bytes(layers[0]).total
    rows, generator = [], torch.Generator(DEVICE).manual_seed(8)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
    for layer in layers:
        keep = torch.rand(1, heads, tokens, device=DEVICE, generator=generator) < 0.25
        before, held = (torch.cuda.memory_allocated() if DEVICE == "cuda" else 0), held_bytes(layer).total
        layer.evict(keep)
        freed = held - held_bytes(layer).total
        row = {"name": "evicted", "layer": layer.index, "freed, MiB": freed / 2**20, "passed": freed > 0.7 * held}
        if DEVICE == "cuda":
            fell = before - torch.cuda.memory_allocated()
            row |= {"memory_allocated fell, MiB": fell / 2**20, "passed": fell >= 0.98 * freed}
        rows.append(said(row))
    if DEVICE == "cuda":
        above = torch.cuda.max_memory_allocated() - start
        rows.append(said({"name": "peak above all layers, of one", "share": above / whole, "passed": above <= whole}))
    return rows


def allocation(dry: bool) -> list[dict]:
    """The contour level of all layers against the dense causal attention of one, in bfloat16."""
    heads, group, size, layers = (2, 2, 8, 2) if dry else (8, 4, 128, 32)
    rows = []
    for tokens in (32,) if dry else (2048, 4096, 8192, 16384):
        generator = torch.Generator(DEVICE).manual_seed(9)
        masses = tuple(torch.rand(heads, tokens, device=DEVICE, generator=generator) ** 8 for _ in range(layers))
        cost = 4 * size + 4
        problem = Problem(masses, None, (cost,) * layers, layers * heads * tokens * cost // 4)
        on_cpu = Problem(tuple(mass.cpu() for mass in masses), None, problem.costs, problem.budget)
        same = all(
            torch.equal(a.cpu(), b) for a, b in zip(Contour().entries(problem), Contour().entries(on_cpu), strict=True)
        )
        dtype = torch.float32 if dry else torch.bfloat16
        query = torch.randn(1, heads * group, tokens, size, device=DEVICE, dtype=dtype)
        key, value = (torch.randn(1, heads, tokens, size, device=DEVICE, dtype=dtype) for _ in range(2))
        dense = statistics.median(
            seconds(
                lambda query=query, key=key, value=value: scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                ),
                2 if dry else 20,
            )
        )
        split = statistics.median(seconds(lambda problem=problem: Contour().share(problem), 2 if dry else 20)) / layers
        rows.append(
            said(
                {
                    "name": "allocation",
                    "tokens": tokens,
                    "a layer, us": 1e6 * split,
                    "dense layer, us": 1e6 * dense,
                    "ratio": split / dense,
                    "passed": same,
                }
            )
        )
    return rows


def random_rows(count: int, keys: int, size: int, flat: float, seed: int) -> list[Instance]:
    """Rows with weights of spread `flat` (0: all equal) and normal values."""
    rng = np.random.default_rng(seed)
    scores = flat * rng.standard_normal((count, keys))
    weights = np.exp(scores)
    weights /= weights.sum(1, keepdims=True)
    return [Instance(p, v) for p, v in zip(weights, rng.standard_normal((count, keys, size)), strict=True)]


def enumeration(dry: bool) -> list[dict]:
    """Pools of many rows at once: the sets of the row-by-row search, and sets a second."""
    rows = []
    instances = random_rows(4 if dry else 64, 64, 8 if dry else 64, 1.0, 10)
    for s, families in (
        (4, [MassPool(4, 0, 20 if dry else 70)]),
        (8, [MassPool(8, 0, 12 if dry else 24), Neighbourhood(8, 3, 10)]),
        (16, [MassPool(16, 0, 20 if dry else 24)]),
    ):
        ranked = [RankedRow.of(instance, 64) for instance in instances]
        together = search_together(ranked, s, families, 48, DEVICE)
        alone = [row.search(s, families, 48) for row in ranked]
        worst = max(abs(a.pool.error - b.pool.error) / b.pool.error for a, b in zip(together, alone, strict=True))
        rows.append(said({"name": "pools together", "s": s, "error": worst, "passed": worst <= 1e-12}))
    for s, pool, count in (
        ((4, 12, 4), (8, 12, 4)) if dry else ((4, 70, 4096), (8, 24, 4096), (16, 24, 4096), (8, 30, 512))
    ):
        ranked = [RankedRow.of(instance, pool) for instance in random_rows(count, pool + 2, 64, 1.0, 11)]
        g, p = (torch.from_numpy(np.stack([getattr(row, n) for row in ranked])).to(DEVICE) for n in ("g", "p"))
        known = torch.tensor([row.kept_set(np.arange(s)).error for row in ranked], dtype=torch.float64, device=DEVICE)
        took = seconds(lambda g=g, p=p, s=s, known=known: best_in_batch(g, p, 0, s, known), 1 if dry else 5)
        rate = count * comb(pool, s) / statistics.median(took)
        rows.append(said({"name": "sets a second, all passes", "s": s, "pool": pool, "rows": count, "G/s": rate / 1e9}))
    return rows


def all_keys(dry: bool) -> list[dict]:
    """s = 4 over all keys by products of pairs: the answer of the walk, and seconds a row."""
    rows = []
    for instance in random_rows(2, 24 if dry else 200, 8 if dry else 64, 0.3, 12):
        by_walk = best_of_all(instance, 4, method="walk")
        by_products = best_of_all(instance, 4, method="halves", device=DEVICE)
        off = abs(by_walk.error - by_products.error) / by_walk.error
        both = by_walk.proved and by_products.proved
        rows.append(said({"name": "all keys as the walk", "error": off, "passed": both and off <= 2e-6}))
    for keys in (24,) if dry else (1024, 4096):
        (instance,) = random_rows(1, keys, 8 if dry else 64, 0.3, 13)
        wait()
        began = perf_counter()
        found = best_of_all(instance, 4, method="halves", device=DEVICE, most_work=1e15)
        wait()
        took = perf_counter() - began
        rows.append(
            said({"name": "all keys, s = 4", "keys": keys, "s a row": took, "sets": found.sets, "passed": found.proved})
        )
    return rows


@torch.no_grad()
def capture(dry: bool) -> list[dict]:
    """Rows of a long context: they reproduce the model's output (else it raises), and what they need beside it."""
    tokens, positions = (48, [20, 47]) if dry else (16384, [4095, 8191, 12287, 16383])
    model = model_of(dry, 2)
    ids = torch.randint(256, (tokens,), generator=torch.Generator().manual_seed(14)).tolist()
    inputs = torch.tensor([ids], device=DEVICE)

    def peak(call: Callable[[], object]) -> int:
        if DEVICE == "cpu":
            call()
            return 0
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(lambda: model.base_model(input_ids=inputs, use_cache=False))
    captured = peak(lambda: capture_rows(model, ids, positions))
    heads = model.config.num_attention_heads
    bound = 12 * heads * len(positions) * tokens * 8 + 4 * tokens * model.config.hidden_size * 8
    row = {"name": "capture", "tokens": tokens, "above the pass, MiB": (captured - plain) / 2**20}
    return [said({**row, "allowed, MiB": bound / 2**20, "passed": captured - plain <= bound})]


PARTS = {
    "steps": steps,
    "evict": evict,
    "allocation": allocation,
    "enumeration": enumeration,
    "all_keys": all_keys,
    "capture": capture,
}
