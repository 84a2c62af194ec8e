"""Everything that runs on a GPU: is it right, and how fast is it beside the memory and its peers?

    python benchmarks/device.py --out device.json             a CUDA machine, under six minutes
    python benchmarks/device.py --out device.json --only check replay times steps evict allocation enumeration ...
    TRITON_INTERPRET=1 python benchmarks/device.py --dry      every line of this at tiny shapes, on the CPU

First the Triton kernels against a float64 loop over heads and rows, for every dtype, head size and option and for every
configuration that is timed; these run in processes side by side, which also leaves the compiled kernels in Triton's
cache. Then a captured CUDA graph whose lengths are changed between replays, and a step while PyTorch forbids waiting.
Then one layer's attention for one new token: 8 KV heads of 4 query heads, head size 128, bfloat16, on average 8,192 of
32,768 entries kept, at batch 1 and 8. Each side is captured as a CUDA graph that goes through as many layers as exceed
the L2 cache several times; printed are the median over the replays, the 10th and 90th percentile, all in microseconds a
call, the kept bytes over the time, and the ratio to the time that the kept bytes take at the copy's bandwidth (bytes
read and written, of 1 GiB).

Last whole decode steps, eviction, the allocator, the two exact searches and capture (`device_parts.py`), each against
its plain form and timed.

`--configs` times other configurations of the first kernel too: a JSON list of objects with fields of
`contourkv.ragged.split_k.Config`. Needs torch, triton, transformers, numba, numpy, pandas and hypothesis; contourkv is
found beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import numpy as np
import torch

try:
    import triton
except ModuleNotFoundError:
    sys.exit("benchmarks/device.py: needs triton, which times its peers too: pip install 'contourkv[triton]'")
from attention_oracle import TOLERANCE, Layer, oracle, random_layer
from device_parts import DEVICE, PARTS, no_waiting
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from contourkv.provenance import write_json
from contourkv.ragged import split_k
from contourkv.ragged.split_k import Config

SIZES = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 7)
OPTIONS = (
    {"window": 200},
    {"softcap": 20.0},
    {"sinks": True},
    {"padded": True},
    {"rows": 5},
    {"rows": 40},
    {"aliased": True, "rows": 2, "window": 90, "softcap": 5.0, "sinks": True, "padded": True},
)
CONFIGS = (
    Config(chunk=64, overlap=True),
    Config(chunk=64, programs=3),
    Config(chunk=64, stages=4),
    Config(chunk=64, warps=8),
    Config(chunk=32, stages=4, programs=3),
    Config(chunk=32, stages=5, programs=2),
    Config(chunk=128, stages=2, warps=8),
    Config(chunk=128, stages=3, warps=8, programs=1),
)
"""What is timed beside the default of bfloat16 at 128."""


@dataclass(frozen=True)
class Shape:
    """What is timed."""

    heads: int = 8
    group: int = 4
    size: int = 128
    full: int = 32768
    mean: int = 8192
    tail: int = 32
    batches: tuple[int, ...] = (1, 8)
    replays: int = 40
    copied: int = 2**30  # bytes
    least_layers: int = 2


DRY = Shape(heads=2, group=2, size=16, full=64, mean=16, tail=3, batches=(2,), replays=1, copied=2**12, least_layers=1)


# ---------------------------------------------------------------------- right


@dataclass(frozen=True)
class Case:
    """One comparison with the float64 loop."""

    dtype: str
    size: int
    value_size: int
    group: int
    options: dict
    config: Config | None = None

    def error(self) -> float:
        """Largest difference over the tolerance of the dtype; NaN counts as infinite."""
        dtype = getattr(torch, self.dtype)
        lengths = [[9, 0], [21, 5]] if DEVICE == "cpu" else [[700, 0, 64], [17, 1500, 129]]
        options = {"tail": 40, "group": self.group, "size": self.size, "value_size": self.value_size, **self.options}
        layer = random_layer(self.size + self.group, lengths, **options).to(dtype)
        found = attend_to(on_device(layer), self.config).cpu().double()
        worst = float((found - oracle(layer)).abs().max() / TOLERANCE[dtype])
        return worst if np.isfinite(worst) else float("inf")


def cases(dry: bool, configs: Sequence[Config]) -> list[Case]:
    if dry:
        return [
            Case("float32", 16, 16, 2, {}),
            Case("bfloat16", 80, 80, 1, OPTIONS[-1]),
            Case("float16", 16, 24, 3, {}, Config(chunk=16, programs=1)),
        ]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in split_k.DTYPES]
    every = [Case(dtype, size, size, group, {}) for dtype in dtypes for size in SIZES for group in GROUPS]
    every += [Case(dtype, 192, 128, 4, {}) for dtype in dtypes]
    every += [Case(dtype, 128, 128, 4, options) for dtype in dtypes for options in OPTIONS]
    every += [Case("bfloat16", 128, 128, 4, {}, config) for config in configs]
    every += [Case("float32", 128, 128, 4, {}, replace(split_k.CONFIGS[4, 128], precision="ieee"))]
    return every


def check(asked: argparse.Namespace) -> list[dict]:
    """Every case, in processes that take the kernels in turn."""
    every = cases(asked.dry, asked.configs)
    if asked.dry:
        found = [outcome(case) for case in every]
    else:
        workers = min(asked.workers, os.cpu_count() or 1)
        command = [sys.executable, str(Path(__file__)), "--configs", json.dumps([asdict(c) for c in asked.configs])]
        parts = [
            subprocess.Popen([*command, "--part", f"{part}/{workers}"], stdout=subprocess.PIPE, text=True)
            for part in range(workers)
        ]
        found = []
        for part in parts:
            printed, _ = part.communicate()
            found += [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        if len(found) != len(every):
            print(f"FAIL: {len(every) - len(found)} of {len(every)} comparisons did not end")
    for row in found:
        if not row["passed"]:
            print("FAIL", json.dumps(row))
    passed = sum(row["passed"] for row in found)
    print(
        f"right: {passed} of {len(every)} comparisons with float64; largest error over its tolerance by dtype:", end=""
    )
    for name in sorted({row["dtype"] for row in found}):
        print(f"  {name} {max(row['error'] for row in found if row['dtype'] == name):.3f}", end="")
    print(flush=True)
    return [*found, {"passed": passed == len(every), "name": "all comparisons"}]


def check_part(asked: argparse.Namespace) -> None:
    part, workers = map(int, asked.part.split("/"))
    every = cases(False, asked.configs)
    kernels: dict[str, int] = {}  # cases of one compiled kernel stay in one process
    for case in every:
        kernel = json.dumps([case.dtype, case.size, case.value_size, case.options, str(case.config)])
        if kernels.setdefault(kernel, len(kernels)) % workers == part:
            print(json.dumps(outcome(case)), flush=True)


def outcome(case: Case) -> dict:
    row = {**asdict(case), "name": "comparison"}
    try:
        error = case.error()
    except Exception as problem:  # one that cannot be compiled must not hide the others
        return {**row, "error": float("inf"), "passed": False, "problem": f"{type(problem).__name__}: {problem}"[:500]}
    return {**row, "error": error, "passed": error <= 1}


def on_device(layer: Layer) -> Layer:
    return replace(
        layer, **{name: value.to(DEVICE) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    )


def attend_to(layer: Layer, config: Config | None = None) -> torch.Tensor:
    held = layer.contents()
    if not (split_k.fits(layer.query, held) or DEVICE == "cpu"):
        raise SystemExit("the Triton way does not take what it is to be compared on")
    return split_k.attend(layer.query, held, layer.scaling, layer.softcap, layer.sinks, config)


# ---------------------------------------------------------------------- replay


def replay(asked: argparse.Namespace) -> list[dict]:
    """A captured step whose tensors hold other numbers at every replay, and a step that may not wait."""
    rows = []
    longest = 24 if asked.dry else 3000
    layer = random_layer(3, [[longest, longest], [longest, longest]], group=4, size=16 if asked.dry else 128, tail=64)
    layer = on_device(layer.to(torch.float32 if asked.dry else torch.bfloat16))
    length, first = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    begin, end = layer.begin.clone(), layer.end.clone()
    fixed = replace(layer, begin=begin, end=end, tail_length=length, tail_first=first)
    generator = torch.Generator().manual_seed(4)

    def change() -> Layer:
        """New numbers in the same tensors; the layer as the float64 loop must see it."""
        starts = torch.randint(0, 3 * longest, (2, 2), generator=generator)
        counts = torch.randint(0, longest, (2, 2), generator=generator)
        tail = int(torch.randint(1, 64, (), generator=generator))
        for tensor, value in ((begin, starts), (end, starts + counts), (length, tail), (first, 5 * longest)):
            tensor.copy_(torch.as_tensor(value))
        cpu = {name: value.cpu() for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        return replace(
            layer, **{**cpu, "begin": starts, "end": starts + counts}, tail_length=tail, tail_first=5 * longest
        )

    change()
    with no_waiting():
        output = attend_to(fixed)
    step: Callable[[], object]
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = attend_to(fixed)
        step = graph.replay
    else:

        def step() -> None:
            output.copy_(attend_to(fixed))

    for number in range(2 if asked.dry else 12):
        expected = oracle(change())
        output.fill_(float("nan"))
        step()
        error = float((output.cpu().double() - expected).abs().max() / TOLERANCE[layer.query.dtype])
        rows.append({"name": "replay with other lengths", "number": number, "error": error, "passed": error <= 1})
    passed = sum(row["passed"] for row in rows)
    print(f"replay: {passed} of {len(rows)} replays of one captured step with other lengths are right", flush=True)
    return rows


# ---------------------------------------------------------------------- fast


def microseconds(calls: Sequence[Callable[[], object]], replays: int, graph: bool = True) -> np.ndarray:
    """Of one call, once a replay of all of them in turn; as a CUDA graph, unless the host's launching is to count."""
    for call in calls:
        call()
    if DEVICE == "cpu":
        seen = []
        for _ in range(replays):
            began = perf_counter()
            for call in calls:
                call()
            seen.append((perf_counter() - began) * 1e6 / len(calls))
        return np.array(seen)
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kept = [call() for call in calls]  # outputs stay alive: none is written over another
        again = captured.replay
    else:

        def again() -> None:
            for call in calls:
                call()

    for _ in range(3):
        again()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for began, ended in marks:
        began.record()
        again()
        ended.record()
    torch.cuda.synchronize()
    if graph:
        del kept
    return np.array([began.elapsed_time(ended) * 1e3 / len(calls) for began, ended in marks])


def run_lengths(kind: str, shape: Shape, batch: int, mean: int, rng: np.random.Generator) -> np.ndarray:
    """Entries of each run, (batch, heads), of this mean: equal, lognormal, one run of 8 times the mean; or none."""
    count = batch * shape.heads
    if kind == "tail alone":
        return np.zeros((batch, shape.heads), int)
    if kind == "equal":
        return np.full((batch, shape.heads), mean)
    if kind == "one of 8 x":
        rest = max(count - 8, 0) * mean // max(count - 1, 1)
        lengths = np.full(count, rest)
        lengths[0] = count * mean - rest * (count - 1)
        return lengths.reshape(batch, shape.heads)
    weights = rng.lognormal(0.0, 0.6, count)
    lengths = np.minimum(weights / weights.sum() * count * mean, shape.full).astype(int)
    lengths[np.argmin(lengths)] += count * mean - lengths.sum()
    return lengths.reshape(batch, shape.heads)


class Step:
    """One layer of a batch, ready for one new token by ours and by the peers."""

    def __init__(self, shape: Shape, lengths: np.ndarray, dtype: torch.dtype, generator: torch.Generator) -> None:
        batch, heads = lengths.shape
        self.shape, self.batch, self.scaling = shape, batch, shape.size**-0.5
        counts = torch.as_tensor(lengths, dtype=torch.int64)
        end = counts.flatten().cumsum(0).view(batch, heads)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)

        entries = int(counts.sum())
        self.layer = Layer(
            query=normal(batch, 1, heads * shape.group, shape.size).transpose(1, 2),
            keys=normal(entries, shape.size),
            values=normal(entries, shape.size),
            positions=torch.zeros(entries, dtype=torch.int32, device=DEVICE),
            begin=(end - counts).to(DEVICE),
            end=end.to(DEVICE),
            tail_keys=normal(batch, heads, 2 * shape.tail, shape.size),
            tail_values=normal(batch, heads, 2 * shape.tail, shape.size),
            tail_length=torch.tensor(shape.tail, device=DEVICE),
            tail_first=torch.tensor(shape.full, device=DEVICE),
            scaling=self.scaling,
        )
        self.kept_bytes = (entries + batch * heads * shape.tail) * 2 * shape.size * dtype.itemsize
        self.counts = counts

    def ours(self, config: Config | None = None) -> torch.Tensor:
        return attend_to(self.layer, config)

    def folded(self) -> torch.Tensor:
        """The query with its group as rows of one KV head, (B, H, G, d)."""
        query = self.layer.query
        return query.reshape(self.batch, self.shape.heads, self.shape.group, self.shape.size)

    def runs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every run with its tail."""
        layer, tail = self.layer, self.shape.tail
        found, last = [], 0
        for run, count in enumerate(self.counts.flatten().tolist()):
            b, h = divmod(run, self.shape.heads)
            part = slice(last, last + count)
            last += count
            found.append(
                (
                    torch.cat([layer.keys[part], layer.tail_keys[b, h, :tail]]),
                    torch.cat([layer.values[part], layer.tail_values[b, h, :tail]]),
                )
            )
        return found

    def by_padding(self) -> Callable[[], torch.Tensor]:
        """SDPA over rectangles as long as the longest run, with a mask."""
        runs, heads = self.runs(), self.shape.heads
        longest = -(-max(len(keys) for keys, _ in runs) // 16) * 16
        shape = (self.batch, heads, longest, self.shape.size)
        keys, values = (runs[0][0].new_zeros(shape) for _ in range(2))
        mask = torch.zeros(self.batch, heads, 1, longest, dtype=torch.bool, device=DEVICE)
        for run, (key, value) in enumerate(runs):
            b, h = divmod(run, heads)
            keys[b, h, : len(key)], values[b, h, : len(key)], mask[b, h, 0, : len(key)] = key, value, True
        mask = mask.expand(-1, -1, self.shape.group, -1)
        query = self.folded()
        return lambda: scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)

    def by_varlen(self) -> Callable[[], torch.Tensor]:
        """PyTorch's attention over sequences of any length: every run a sequence of one head."""
        from torch.nn.attention.varlen import varlen_attn

        runs = self.runs()
        keys, values = (torch.cat(parts).unsqueeze(1) for parts in zip(*runs, strict=True))
        ends = torch.tensor([0, *(len(key) for key, _ in runs)], device=DEVICE).cumsum(0).int()
        rows = torch.arange(len(runs) + 1, device=DEVICE, dtype=torch.int32) * self.shape.group
        query = self.folded().reshape(-1, 1, self.shape.size).contiguous()
        longest = max(len(key) for key, _ in runs)

        def call() -> torch.Tensor:
            output = varlen_attn(query, keys, values, rows, ends, self.shape.group, longest)
            return output.view(self.batch, self.shape.heads, self.shape.group, self.shape.size)

        return call


class Times:
    """What is timed, row by row."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.rows: list[dict] = []
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self.beyond_cache = 4 * (torch.cuda.get_device_properties(0).L2_cache_size if DEVICE == "cuda" else 1)
        source = torch.randn(shape.copied // 4, device=DEVICE)
        target = torch.empty_like(source)
        seen = microseconds([lambda: target.copy_(source)], shape.replays)
        moved = 2 * source.numel() * 4
        self.bandwidth = moved / float(np.median(seen))  # bytes a microsecond
        self.rows.append({"name": "copy", "bytes": moved, **spread(seen)})
        print(f"copy of {shape.copied / 2**20:g} MiB: {self.bandwidth / 1e6:.3f} TB/s read and written", flush=True)

    def time(
        self, name: str, batch: int, kept_bytes: int, calls: Callable[[], list], graph: bool = True, **more: object
    ) -> None:
        """Add a row; of a side that cannot run here, one that says why."""
        row = {"name": name, "batch": batch, "kept_bytes": kept_bytes, **more}
        try:
            seen = microseconds(calls(), self.shape.replays, graph)
        except Exception as problem:
            row["problem"] = f"{type(problem).__name__}: {problem}"[:500]
        else:
            row |= {**spread(seen), "over_bandwidth": float(np.median(seen)) * self.bandwidth / kept_bytes}
        self.rows.append(row)

    def steps(self, kind: str, batch: int, mean: int | None = None, dtype: torch.dtype | None = None) -> list[Step]:
        """As many layers as exceed the cache; of a tail alone, 8."""
        lengths = run_lengths(kind, self.shape, batch, mean or self.shape.mean, np.random.default_rng(1))
        made = [Step(self.shape, lengths, dtype or self.dtype, self.generator)]
        count = max(self.shape.least_layers, -(-self.beyond_cache // made[0].kept_bytes))
        for _ in range(min(count, 8 if kind == "tail alone" else count) - 1):
            made.append(Step(self.shape, lengths, dtype or self.dtype, self.generator))
        return made

    def ours(self, name: str, batch: int, steps: list[Step], config: Config | None = None, graph: bool = True) -> None:
        calls = [lambda step=step: step.ours(config) for step in steps]
        more = {} if config is None else {"config": asdict(config)}
        self.time(f"contourkv, {name}", batch, steps[0].kept_bytes, lambda: calls, graph, **more)

    def peers(self, batch: int, steps: list[Step]) -> None:
        """Others over the same kept entries, after a look at whether they compute the same."""
        for name, peer in (("padded SDPA with a mask", Step.by_padding), ("varlen_attn", Step.by_varlen)):
            self.rows.append(agreement(name, steps[0], peer, batch))
            self.time(
                f"{name}, lognormal", batch, steps[0].kept_bytes, lambda peer=peer: [peer(step) for step in steps]
            )

    def full(self, batch: int) -> None:
        """FlashAttention, through SDPA, over all tokens of all heads: the group as rows, or with shared heads."""
        shape = self.shape
        size = (batch, shape.heads, shape.full, shape.size)
        entry_bytes = batch * shape.heads * 2 * shape.size * self.dtype.itemsize
        layers = max(1, -(-self.beyond_cache // (entry_bytes * shape.full)))

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=self.generator, device=DEVICE, dtype=self.dtype)

        caches = [(normal(*size), normal(*size)) for _ in range(layers)]
        for name, *rows in (
            ("group as rows", shape.heads, shape.group),
            ("enable_gqa", shape.heads * shape.group, 1),
        ):
            query = normal(batch, *rows, shape.size)

            def dense(cache: tuple, query: torch.Tensor = query, gqa: bool = name == "enable_gqa") -> torch.Tensor:
                with sdpa_kernel(SDPBackend.FLASH_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH):
                    return scaled_dot_product_attention(query, *cache, enable_gqa=gqa)

            calls = [lambda cache=cache, dense=dense: dense(cache) for cache in caches]
            name = f"FlashAttention over the full cache, {name}"
            self.time(name, batch, entry_bytes * shape.mean, lambda calls=calls: calls)


def times(asked: argparse.Namespace) -> list[dict]:
    table = Times(DRY if asked.dry else Shape(), torch.float32 if asked.dry else torch.bfloat16)
    for batch in table.shape.batches:
        equal = table.steps("equal", batch)
        table.ours("equal", batch, equal)
        for config in asked.configs:
            table.ours("other configuration", batch, equal, config)
        table.ours("equal, launched by the host", batch, equal, graph=False)
        del equal
        lognormal = table.steps("lognormal", batch)
        table.ours("lognormal", batch, lognormal)
        table.peers(batch, lognormal)
        del lognormal
        table.ours("one of 8 x the mean", batch, table.steps("one of 8 x", batch))
        table.ours("half kept", batch, table.steps("equal", batch, mean=table.shape.full // 2))
        table.ours("tail alone", batch, table.steps("tail alone", batch))
        for dtype in (torch.float16, torch.float32):
            table.ours(f"equal, {str(dtype).removeprefix('torch.')}", batch, table.steps("equal", batch, dtype=dtype))
        table.full(batch)
    return table.rows


def spread(seen: np.ndarray) -> dict[str, float]:
    low, median, high = np.percentile(seen, [10, 50, 90])
    return {"low": float(low), "median": float(median), "high": float(high)}


def agreement(name: str, step: Step, peer: Callable[[Step], Callable], batch: int) -> dict:
    """Whether a peer computes what ours does; what cannot run here is neither right nor wrong."""
    row = {"name": f"same as {name}", "batch": batch}
    try:
        theirs = peer(step)().float()
    except Exception as problem:
        return {**row, "problem": f"{type(problem).__name__}: {problem}"[:500]}
    error = float((theirs - step.ours().float().reshape(theirs.shape)).abs().max() / TOLERANCE[step.layer.query.dtype])
    return {**row, "error": error, "passed": error <= 1}


# ---------------------------------------------------------------------- printing


def show(rows: list[dict]) -> None:
    print(f"\n{'side':<62}{'batch':>6}{'us':>9}{'10%':>9}{'90%':>9}{'GB/s kept':>11}{'x best':>8}")
    for row in rows:
        if "batch" not in row:
            continue
        name = row["name"]
        if "config" in row and "other" in name:
            default = Config(chunk=0)
            changed = {f.name: row["config"][f.name] for f in fields(Config)}
            name = "  " + ", ".join(f"{k} {v}" for k, v in changed.items() if v != getattr(default, k))
        if "problem" in row and name != "comparison":
            print(f"{name[:61]:<62}{row.get('batch', ''):>6}  {row['problem'][:60]}")
        elif "kept_bytes" in row:
            rate = row["kept_bytes"] / row["median"] / 1e3
            print(
                f"{name[:61]:<62}{row['batch']:>6}{row['median']:>9.2f}{row['low']:>9.2f}{row['high']:>9.2f}"
                f"{rate:>11.0f}{row['over_bandwidth']:>8.2f}"
            )
    failed = [row for row in rows if row.get("passed") is False]
    print(f"\n{'PASS' if not failed else f'FAIL: {len(failed)} of the comparisons'}")


OWN = ("check", "replay", "times")
ORDER = ("check", "replay", *PARTS, "times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write everything to this JSON file")
    parser.add_argument("--only", choices=ORDER, nargs="+", default=ORDER)
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the CPU in Triton's interpreter")
    parser.add_argument("--configs", help="JSON list of configurations to time instead of those named here")
    parser.add_argument("--workers", type=int, default=8, help="processes that compare")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if DEVICE == "cpu" and not (asked.dry and split_k.INTERPRETED):
        parser.error("no CUDA device: set TRITON_INTERPRET=1 and give --dry, or run it where there is one")
    if asked.configs:
        asked.configs = [Config(**config) for config in json.loads(asked.configs)]
    else:
        asked.configs = [Config(chunk=16, programs=1)] if asked.dry else list(CONFIGS)
    if asked.part:
        check_part(asked)
        return
    began, rows = perf_counter(), []
    machine = {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}
    if DEVICE == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {"device": properties.name, "multiprocessors": properties.multi_processor_count}
    print(machine, flush=True)
    for part in asked.only:
        print(f"{part}:", flush=True)
        try:
            rows += globals()[part](asked) if part in OWN else PARTS[part](asked.dry)
        except Exception:  # device time is short: what is left must still run
            problem = traceback.format_exc()
            print(problem, flush=True)
            rows.append({"name": part, "passed": False, "problem": problem[-2000:]})
        print(f"{part}: {perf_counter() - began:.0f} s so far", flush=True)
        if asked.out:  # what there is, should the rest not end
            write_json(asked.out, {"machine": machine, "rows": rows})
    show(rows)
    if any(row.get("passed") is False for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
