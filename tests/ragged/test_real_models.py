"""The two small real models, where they are prepared: what holds on random weights must hold on learnt ones.

`snakemake --cores 2 models_all` prepares them; without it these tests are skipped, and said to be.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from contourkv import ContourKVPress, RaggedCache, held_bytes
from contourkv.allocator import Uniform
from contourkv.models import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "resources" / "models"


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def real(request):
    folder = MODELS / request.param
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not prepared: snakemake --cores 2 models_all")
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("|", "!", " ", "make", "snakemake")))
    ids = load_tokenizer(folder)(text, return_tensors="pt").input_ids[:, :700]
    return load_model(folder, dtype="float32"), ids


@torch.no_grad()
def test_logits_are_those_of_a_dynamic_cache(real):
    model, ids = real
    ours, theirs = RaggedCache(model.config), DynamicCache(config=model.config)
    for piece in (slice(0, 600), slice(600, 640), *(slice(at, at + 1) for at in range(640, 660))):
        apart = model(ids[:, piece], past_key_values=ours).logits - model(ids[:, piece], past_key_values=theirs).logits
        assert apart.abs().max() <= 1e-4


def test_64_greedy_tokens_are_the_same(real):
    model, ids = real
    given = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    theirs = model.generate(ids[:, :300], **given)
    ours = model.generate(ids[:, :300], past_key_values=RaggedCache(model.config), **given)
    assert torch.equal(ours, theirs)


@torch.no_grad()
def test_half_the_bytes_are_gone_and_the_right_half(real):
    """The text goes on better over what the press kept than over as many keys drawn at random."""
    model, ids = real

    def drawn(module, hidden_states, keys, *rest):
        return torch.rand(keys.shape[:3], generator=torch.Generator().manual_seed(module.layer_idx))

    losses, held = [], []
    for press in (
        ContourKVPress(1.0),
        ContourKVPress(0.5),
        ContourKVPress(0.5, scores=drawn, split=Uniform()),
    ):
        cache = RaggedCache(model.config)
        with press(model):
            model(ids[:, :600], past_key_values=cache)
        held.append(held_bytes(cache).payload)
        logits = model(ids[:, 600:-1], past_key_values=cache).logits[0]
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 601:])))
    assert held[1] <= held[0] / 2 and held[2] <= held[0] / 2
    full, ours, random = losses
    assert abs(ours - full) < 0.5 * (random - full)
