"""The two small real models, where they are prepared: what holds on random weights must hold on learnt ones.

`snakemake --cores 2 contexts_all` prepares them and their text; without it these tests are skipped, and said to be.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import DynamicCache

from contourkv import ContourKVPress, RaggedCache, held_bytes
from contourkv.allocator import Uniform
from contourkv.contexts import build_contexts
from contourkv.models import load_model, wheel_name

ROOT = Path(__file__).parents[2]
MODELS, WHEELS = ROOT / "resources" / "models", ROOT / "resources" / "wheels"
CONTEXTS = 4


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def real(request):
    """A model and contexts of 700 tokens of prose, each (1, 700)."""
    folder = MODELS / request.param
    prose = yaml.safe_load((ROOT / "config/texts.yaml").read_text())["text_sources"]["prose"]
    if not (folder / "config.json").is_file() or not (WHEELS / wheel_name(prose["wheel"])).is_file():
        pytest.skip(f"{folder} and the prose are not prepared: snakemake --cores 2 contexts_all")
    contexts = build_contexts(folder, "prose", prose, WHEELS, 700, CONTEXTS, 5)
    return load_model(folder, dtype="float32"), [torch.tensor([context.ids]) for context in contexts]


@torch.no_grad()
def test_logits_are_those_of_a_dynamic_cache(real):
    model, (ids, *_) = real
    ours, theirs = RaggedCache(model.config), DynamicCache(config=model.config)
    for piece in (slice(0, 600), slice(600, 640), *(slice(at, at + 1) for at in range(640, 660))):
        apart = model(ids[:, piece], past_key_values=ours).logits - model(ids[:, piece], past_key_values=theirs).logits
        assert apart.abs().max() <= 1e-4


def test_64_greedy_tokens_are_the_same(real):
    model, (ids, *_) = real
    given = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    theirs = model.generate(ids[:, :300], **given)
    ours = model.generate(ids[:, :300], past_key_values=RaggedCache(model.config), **given)
    assert torch.equal(ours, theirs)


@torch.no_grad()
def test_half_the_bytes_are_gone_and_the_right_half(real):
    """The texts go on better over what the press kept than over as many keys drawn at random."""
    model, contexts = real

    def drawn(module, hidden_states, keys, *rest):
        return torch.rand(keys.shape[:3], generator=torch.Generator().manual_seed(module.layer_idx))

    presses = ContourKVPress(1.0), ContourKVPress(0.5), ContourKVPress(0.5, scores=drawn, split=Uniform())
    losses = torch.zeros(len(presses), dtype=torch.float64)
    for ids in contexts:
        held = []
        for index, press in enumerate(presses):
            cache = RaggedCache(model.config)
            with press(model):
                model(ids[:, :600], past_key_values=cache)
            held.append(held_bytes(cache).payload)
            logits = model(ids[:, 600:-1], past_key_values=cache).logits[0]
            losses[index] += float(torch.nn.functional.cross_entropy(logits, ids[0, 601:])) / len(contexts)
        assert held[1] <= held[0] / 2 and held[2] <= held[0] / 2
    full, ours, random = losses.tolist()
    assert abs(ours - full) < 0.5 * (random - full)
