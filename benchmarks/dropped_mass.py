"""What the dropped mass costs beside a dense attention layer, over the length of the context.

One layer of H query heads, d dimensions, one causal pass over N tokens (torch's scaled dot product attention): dense.
Beside it, in the same run and interleaved, for one query position and all heads:
  rows     the softmax weights of the row, which a decode step computes anyway
  select   max-mass on them: the s heaviest keys
  mass     the dropped mass on top: 1 minus the sum of the s weights that select found

    python benchmarks/dropped_mass.py
    python benchmarks/dropped_mass.py --device cuda --dtype bfloat16 --lengths 2048 4096 8192 16384

Prints medians, their spread (half the distance of the quartiles) and ratios to the dense layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from contourkv.provenance import write_json


def main() -> None:
    asked = arguments()
    device = torch.device(asked.device)
    torch.manual_seed(asked.seed)
    print(
        f"{asked.heads} query heads, {asked.kv_heads} KV heads, {asked.dim} dimensions, {asked.dtype} on {device}, "
        f"{torch.get_num_threads()} threads, s = {asked.budget}, medians of {asked.repeats}"
    )
    names = f"{'dense ms':>14}{'rows ms':>12}{'select ms':>12}{'mass ms':>12}"
    print(f"{'tokens':>8}{names}{'mass / dense':>14}{'with select':>14}")
    results = []
    for length in asked.lengths:
        times = measure(length, asked, device)
        medians = {name: statistics.median(found) for name, found in times.items()}
        ratio = medians["mass"] / medians["dense"]
        whole = (medians["select"] + medians["mass"]) / medians["dense"]
        cells = "".join(f"{1e3 * medians[name]:>12.4g}" for name in ("rows", "select", "mass"))
        print(f"{length:>8}{1e3 * medians['dense']:>14.4g}{cells}{ratio:>14.2g}{whole:>14.2g}")
        spreads = {name: half_quartile(found) / medians[name] for name, found in times.items()}
        print(" " * 8 + "".join(f"{f'±{spreads[name]:.0%}':>{14 if name == 'dense' else 12}}" for name in medians))
        results.append(
            {"tokens": length, "ratio": ratio, "ratio_with_select": whole, "medians_s": medians, "spreads": spreads}
        )
    if asked.json:
        write_json(asked.json, {"arguments": {k: str(v) for k, v in vars(asked).items()}, "results": results})


@torch.no_grad()
def measure(length: int, asked: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each part, interleaved so that all meet the same machine."""
    dtype, group = getattr(torch, asked.dtype), asked.heads // asked.kv_heads
    query = torch.randn(1, asked.heads, length, asked.dim, device=device, dtype=dtype)
    key, value = (torch.randn(1, asked.kv_heads, length, asked.dim, device=device, dtype=dtype) for _ in range(2))
    last = query[0, :, -1].view(asked.kv_heads, group, asked.dim)

    def dense() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=group > 1)

    def rows() -> torch.Tensor:
        return torch.softmax(last @ key[0].transpose(1, 2) * asked.dim**-0.5, dim=-1, dtype=torch.float32)

    weights = rows()

    def select() -> torch.Tensor:
        return weights.topk(asked.budget, dim=-1).values

    kept = select()
    parts = {"dense": dense, "rows": rows, "select": select, "mass": lambda: 1 - kept.sum(dim=-1)}
    for part in parts.values():
        part()
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(asked.repeats):
        for name, part in parts.items():
            times[name].append(seconds(part, device, 1 if name == "dense" else asked.inner))
    return times


def seconds(part: Callable[[], object], device: torch.device, times: int) -> float:
    synchronise(device)
    started = time.perf_counter()
    for _ in range(times):
        part()
    synchronise(device)
    return (time.perf_counter() - started) / times


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def half_quartile(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=9, help="query heads (default: SmolLM2-135M's)")
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--budget", type=int, default=8, help="s, keys kept of a row")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--inner", type=int, default=50, help="runs of a small part in one timing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the results here")
    asked = parser.parse_args()
    if asked.heads % asked.kv_heads:
        parser.error(f"--heads {asked.heads}: expected a multiple of --kv-heads {asked.kv_heads}")
    if asked.budget >= min(asked.lengths):
        parser.error(f"--budget {asked.budget}: expected less than the shortest length {min(asked.lengths)}")
    return asked


if __name__ == "__main__":
    main()
