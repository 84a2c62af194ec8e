"""Answers as the benchmark would give them, made from numbers alone: for the tests of tables, verdicts and figures."""

from __future__ import annotations

import numpy as np
import pandas as pd

from contourkv.benchmark.methods import AGNOSTIC, METHODS, PUBLISHED, QUERY_AWARE, RECTANGULAR
from contourkv.benchmark.records import MERGED

METADATA = {
    "answers": [
        {"contourkv": "0.1.0", "config": "0123456789ab", "model": {"name": "smollm2-135m", "revision": "abc123"}},
        {"contourkv": "0.1.0", "config": "0123456789ab", "model": {"name": "gemma3-270m", "revision": "def456"}},
    ]
}
LABELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma-3-270M"}
COMPARISONS = {"level": 0.05, "flips": 500, "resamples": 60, "seed": 421}
# name: generator, arm, length, measure, rule, floor, questions a sample, what the full cache scores
TASKS = {
    "single-prose-512": ("niah_single", "prose", 512, "accuracy", "all", 0.0, 1, 0.97),
    "keys-prose-512": ("niah_multikey", "prose", 512, "accuracy", "all", 0.25, 1, 0.9),
    "reuse-prose-1024": ("niah_multikey", "prose", 1024, "accuracy", "all", 0.25, 4, 0.9),
    "chain-512": ("vt", "", 512, "accuracy", "all", 0.0, 1, 0.2),
    "squad-512": ("qa_squad", "", 512, "nats", "any", np.nan, 1, -1.4),
}
QUALITY = {
    "full": 1.0,
    "streaming_llm": 0.25,
    "knorm": 0.35,
    "tova": 0.5,
    "snapkv": 0.45,
    "h2o": 0.5,
    "expected_attention": 0.6,
    "compactor": 0.8,
    "kvzip": 0.9,
    "adakv_snapkv": 0.55,
    "adakv_expected_attention": 0.65,
    "quest": 0.7,
    "contour_kvzip": 0.92,
    "contour_compactor": 0.85,
    "contour_snapkv": 0.55,
    "contour": 0.7,
    "random": 0.1,
}


def make_answers(
    models: tuple[str, ...] = ("smollm2-135m",),
    tasks: tuple[str, ...] = tuple(TASKS),
    methods: tuple[str, ...] = tuple(METHODS),
    query_aware: tuple[str, ...] = ("tova", "snapkv", "h2o", "adakv_snapkv", "kvzip"),
    budgets: tuple[float, ...] = (0.25, 0.5),
    samples: int = 8,
    seed: int = 0,
    cost_methods: tuple[str, ...] = tuple(METHODS),
) -> pd.DataFrame:
    """One row a question and cell, scores drawn around each method's quality, bytes as each storage would hold them.

    Methods share a question's difficulty, so that paired differences are narrower than unpaired ones. As in a run, the
    question is in view only in accuracy tasks with one question a sample, and never in rectangular storage; costs are
    probed without it, and for `cost_methods`.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for model in models:
        entry = 768 if model.startswith("smol") else 1024
        for name in tasks:
            generator, arm, length, measure, rule, floor, questions, top = TASKS[name]
            hard = rng.random((samples, questions))
            tokens = length - 20 + rng.integers(0, 12, samples)
            later = query_aware if measure == "accuracy" and questions == 1 else ()
            for method, storage, visibility, budget in _cells(methods, later, budgets):
                keeps = METHODS[method].keeps
                quality = QUALITY[method] ** (0.5 / budget)
                quality = min(1.0, quality + 0.3 * (visibility == QUERY_AWARE)) - 0.15 * (storage == RECTANGULAR)
                for sample in range(samples):
                    full = int(tokens[sample]) * 60 * entry
                    nominal = int(full * budget)
                    whole = keeps in ("all", "pages") or (keeps == "heads" and storage == PUBLISHED)
                    metadata = 0 if storage == PUBLISHED else 240
                    payload = full if whole else (nominal - metadata) // entry * entry
                    for question in range(questions):
                        luck = rng.normal(0, 0.12)
                        if measure == "accuracy":
                            score = float(hard[sample, question] + luck < top * quality)
                        else:
                            score = top - 1.5 * (1 - quality) - 0.6 * hard[sample, question] + luck
                        answer = f"{int(1e6 * hard[sample, question])}"
                        costs = {"probed_bytes": full, "left_bytes": payload, "peak_bytes": full + 0.25 * payload}
                        costs |= {"prefill_seconds": length / 500}
                        costs |= {"compress_seconds": 0.1 + 1.2 * ("kvzip" in method), "tokens_per_s": 20 + 4 / budget}
                        known = method in cost_methods and visibility == AGNOSTIC and storage != RECTANGULAR
                        rows.append(
                            {
                                "model": model,
                                "task": name,
                                "generator": generator,
                                "arm": arm,
                                "length": length,
                                "measure": measure,
                                "rule": rule,
                                "floor": floor,
                                "sample": sample,
                                "question": question,
                                "question_id": f"{name}/{sample}/{question}",
                                "seed": 401 + sample,
                                "method": method,
                                "storage": storage,
                                "visibility": visibility,
                                "budget": budget,
                                "status": "ok",
                                "message": "",
                                "score": score,
                                "answer": answer if measure == "accuracy" and score else "",
                                "expected": answer,
                                "context_tokens": int(tokens[sample]),
                                "entries": payload // entry,
                                "full_bytes": full,
                                "nominal_bytes": nominal,
                                "payload_bytes": payload,
                                "metadata_bytes": metadata,
                                "slack_bytes": 0,
                                "held_bytes": payload + metadata,
                                "read_bytes": nominal if keeps == "pages" else payload,
                                "score_seconds": 0.02 + 0.5 * ("kvzip" in method),
                                **(costs if known else dict.fromkeys(costs, np.nan)),
                                "cost_status": "ok" if known else "",
                                "cost_message": "",
                                "device": "cpu" if known else "",
                            }
                        )
    kinds = {name: object if kind == "category" else kind for name, kind in MERGED.items()}
    return pd.DataFrame(rows, columns=list(MERGED)).astype(kinds)


def fail(frame: pd.DataFrame, message: str, **where: object) -> pd.DataFrame:
    """A copy in which the rows whose columns are as in `where` failed with `message`."""
    frame = frame.copy()
    rows = np.logical_and.reduce([frame[name] == value for name, value in where.items()])
    assert rows.any()
    frame.loc[rows, ["status", "message", "answer"]] = ["failed", message, ""]
    frame.loc[rows, "score"] = np.nan
    frame.loc[rows, ["entries", "payload_bytes", "metadata_bytes", "held_bytes", "read_bytes"]] = 0
    return frame


def _cells(methods, query_aware, budgets):
    for name in methods:
        method = METHODS[name]
        if method.keeps == "all":
            yield name, PUBLISHED, AGNOSTIC, 1.0
            continue
        for storage in method.storages:
            for visibility in (AGNOSTIC, QUERY_AWARE):
                if visibility == AGNOSTIC or (name in query_aware and storage != RECTANGULAR):
                    for budget in budgets:
                        yield name, storage, visibility, budget
