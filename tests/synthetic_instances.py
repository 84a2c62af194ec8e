"""Instances as the measurement would give them, made from numbers alone: for the tests of statistics and figures."""

from __future__ import annotations

import numpy as np
import pandas as pd

DEMO = {"smollm2-135m": (30, 9, 3), "gemma3-270m": (18, 4, 1)}
LABELS = {"smollm2-135m": "SmolLM2-135M", "gemma3-270m": "Gemma-3-270M"}
TINY = {f"tiny-{name}": (2, 4, 2) for name in ("llama", "qwen2", "qwen3", "olmo2", "gemma3")}
ARMS = ("prose", "dialogue", "code")
METADATA = {
    "contourkv": "0.1.0",
    "config": "0123456789ab",
    "model": {"name": "tiny-llama", "revision": "abc123"},
    "seeds": {"prose": 101},
    "inputs": ["prose/000"],
}


def make_instances(
    models: dict[str, tuple[int, int, int]] = TINY,
    arms: tuple[str, ...] = ARMS,
    per_arm: int = 3,
    positions: tuple[int, ...] = (639, 1023),
    budgets: tuple[int, ...] = (4, 8),
    seed: int = 0,
) -> pd.DataFrame:
    """Consistent rows (no invariant broken) where dropped mass raises kappa, by cell, arm, input and chance."""
    rng = np.random.default_rng(seed)
    frames = []
    for model, (layers, heads, kv_heads) in models.items():
        grid = pd.MultiIndex.from_product(
            [arms, range(per_arm), range(layers), range(heads), positions],
            names=["arm", "index", "layer", "head", "position"],
        ).to_frame(index=False)
        edge = np.abs(np.arange(layers) - (layers - 1) / 2) / max(layers / 2, 1)
        cell = 1.5 * edge[:, None] + rng.normal(0, 0.8, (layers, heads))
        text = rng.normal(0, 0.25, (len(arms), per_arm)) + 0.2 * np.arange(len(arms))[:, None]
        arm_code = grid["arm"].map({arm: number for number, arm in enumerate(arms)}).to_numpy()
        level = cell[grid["layer"], grid["head"]] + text[arm_code, grid["index"]] + rng.normal(0, 0.5, len(grid))
        for s in budgets:
            n = len(grid)
            mass = 1 / (1 + np.exp(-(level - 0.8 * np.log2(s / 4) - 0.7)))
            excess = np.exp(1.1 * level - 3.6 + rng.normal(0, 0.9, n))
            attained = rng.random(n) < 1.4 / s**0.8
            kappa = np.where(attained, 1.0, 1 + excess)
            spread = rng.lognormal(0.5, 0.3, n)
            largest = spread * mass * rng.uniform(0.05, 0.6, n)
            pool = largest / kappa
            mass_pool = pool + (largest - pool) * np.where(rng.random(n) < s / 50, rng.uniform(0, 0.5, n), 0.0)
            swap = mass_pool + (largest - mass_pool) * np.where(rng.random(n) < 0.7, 0.0, rng.uniform(0, 0.6, n))
            wide = np.where(rng.random(n) < s / 200, swap * rng.uniform(0.8, 1.0, n), swap)
            second = swap * rng.uniform(0.999, 1.6, n)
            errors = np.stack([largest, pool, wide, second])
            best = errors.argmin(axis=0)
            frames.append(
                pd.DataFrame(
                    {
                        "model": model,
                        "arm": grid["arm"],
                        "input": grid["arm"] + "/" + grid["index"].map("{:03d}".format),
                        "layer": grid["layer"],
                        "head": grid["head"],
                        "kv_head": grid["head"] // (heads // kv_heads),
                        "position": grid["position"],
                        "s": s,
                        "visible": grid["position"] + 1,
                        "es_max_mass": largest,
                        "es_pool": pool,
                        "es_mass_pool": mass_pool,
                        "es_balance": wide,
                        "es_balance_second": second,
                        "es_balance_pool": swap,
                        "es_best": errors.min(axis=0),
                        "best": np.array(["max_mass", "pool", "balance", "balance_second"])[best],
                        "dropped_mass": mass,
                        "phi": largest * (1 - mass),
                        "spread": spread,
                        "bound": 2 * spread * mass,
                        "absolute_bound": 2 * spread * mass * rng.uniform(1.0, 1.5, n),
                        "spectral": rng.uniform(1.0, 40.0, n),
                        "mass_pool": 1 - mass / 2,
                        "pool_subsets": 735471 if s >= 8 else 916895,
                        "pool_keys": 24 if s >= 8 else 70,
                        "pool_complete": False,
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def make_certificates(frame: pd.DataFrame, every: int = 50, seed: int = 1) -> pd.DataFrame:
    """Certificates of every `every`-th row: half proved optimal, a sixth improved by up to 20%, the rest timeouts."""
    rng = np.random.default_rng(seed)
    keys = ["model", "arm", "input", "layer", "head", "position", "s"]
    sample = frame.iloc[::every]
    outcome = rng.choice(["optimal", "improved", "timeout"], len(sample), p=[0.5, 0.17, 0.33])
    error = sample["es_best"] * np.where(outcome == "improved", rng.uniform(0.8, 0.999, len(sample)), 1.0)
    lower = error * np.where(outcome == "optimal", 1 - 1e-6, rng.uniform(0, 0.9, len(sample)))
    return sample[keys].assign(
        es_certified=error,
        certificate=outcome,
        certificate_lower=lower,
        certificate_proved=outcome == "optimal",
        certificate_mass=0.5,
        certificate_max_rank=rng.integers(8, 200, len(sample)),
    )
