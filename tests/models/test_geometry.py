"""Attention geometry is read from the config alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contourkv.errors import InvalidInput
from contourkv.models.geometry import SUPPORTED, attention_geometry, check_architecture

BASE = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 48,
    "max_position_embeddings": 512,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def test_the_paper_architectures_are_supported():
    assert {"llama", "qwen2", "qwen3", "olmo2", "gemma3_text"} <= set(SUPPORTED)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_shapes_and_windows(architecture):
    found = attention_geometry({**BASE, "model_type": architecture, "layer_types": KINDS, "sliding_window": 20})
    assert (found.layers, found.heads, found.kv_heads, found.group, found.head_dim) == (3, 6, 2, 3, 8)
    assert found.windows == (20, None, 20)
    assert found.max_positions == 512
    assert found.eager == (found.sinks or found.softcap is not None)


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_a_transformers_config_and_its_mapping_say_the_same(architecture):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(architecture)
    assert attention_geometry(config) == attention_geometry(config.to_dict())


def test_defaults_of_older_configs():
    config = {**BASE, "model_type": "llama"}
    del config["num_key_value_heads"]
    found = attention_geometry(config)
    assert (found.kv_heads, found.windows, found.softcap, found.sinks) == (6, (None,) * 3, None, False)


def test_soft_cap_and_sinks():
    capped = {**BASE, "attn_logit_softcapping": 50.0}
    assert attention_geometry({**capped, "model_type": "gemma2"}).softcap == 50.0
    # gemma3_text has the key, its attention does not read it
    assert attention_geometry({**capped, "model_type": "gemma3_text"}).softcap is None
    assert attention_geometry({**BASE, "model_type": "gpt_oss"}).sinks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba'.*supported are"),
        ({"model_type": None}, "architecture None"),
        ({"num_key_value_heads": 4}, "6 query heads are not a multiple of 4"),
        ({"use_bidirectional_attention": True}, "only causal"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "layer 1.*'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "names 1 layers of 3"),
    ],
)
def test_what_cannot_be_done_is_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        attention_geometry({**BASE, "model_type": "llama", **change})
    assert check_architecture("llama") == "llama"


def test_torch_is_not_needed():
    code = "import sys, contourkv.models.geometry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
