"""Tiny random checkpoints, one per architecture: whole models in a second, for tests of the whole road."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

# Four query heads on two KV heads; scores of a standard deviation of 1.5 to 2.5, so that rows are not uniform.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
# What an architecture adds; "bos": whether the family's tokenizers add BOS.
ARCHITECTURES: dict[str, dict] = {
    "llama": {"bos": True, "more": {}},
    "qwen2": {"bos": False, "more": {}},
    "qwen3": {"bos": False, "more": {}},
    "olmo2": {"bos": False, "more": {}},
    "gemma3_text": {
        "bos": True,
        "more": {
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 16,
        },
    },
}
WEIGHT_SCALE, BIAS_SCALE, NORM_SCALE, QK_NORM = 0.2, 0.5, 0.1, 1.4
SPECIAL = ("<pad>", "<bos>", "<eos>")


def make_model(spec: Mapping, folder: Path, name: str) -> dict:
    """Write a tiny random checkpoint into `folder`: the same bytes for the same `architecture` and `seed`.

    Parameters
    ----------
    spec : mapping
        `architecture`, `seed`, `dtype`.

    Returns
    -------
    dict
        What source.json says of the source.

    Raises
    ------
    InvalidInput
        An architecture of which none is made.
    """
    architecture, seed = spec.get("architecture"), spec.get("seed", 0)
    if architecture not in ARCHITECTURES:
        raise InvalidInput(
            f"model {name}: no random checkpoint of architecture {architecture!r}; expected one of "
            + ", ".join(ARCHITECTURES)
        )
    import torch
    from transformers import AutoModelForCausalLM

    from .loading import quiet_transformers

    model = AutoModelForCausalLM.from_config(tiny_config(architecture))
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            draw = torch.from_numpy(rng.standard_normal(tuple(weight.shape)).astype(np.float32))
            weight.copy_(_scaled(key, draw, architecture))
    model = model.to(getattr(torch, spec.get("dtype", "float32")))
    with quiet_transformers():
        model.save_pretrained(folder)
    byte_tokenizer(ARCHITECTURES[architecture]["bos"]).save_pretrained(folder)
    return {"seed": seed, "revision": f"random:{architecture}:seed{seed}"}


def tiny_config(architecture: str) -> PretrainedConfig:
    """The config of a tiny checkpoint."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        architecture,
        **SIZES,
        **ARCHITECTURES[architecture]["more"],
        vocab_size=256 + len(SPECIAL),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def byte_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a UTF-8 byte, after padding, BOS and EOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate([*SPECIAL, *alphabet])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_max_length=SIZES["max_position_embeddings"],
    )


def _scaled(key: str, draw: object, architecture: str) -> object:
    if key.endswith("bias"):
        return BIAS_SCALE * draw
    if "norm" in key:
        # gemma multiplies by one plus the weight
        centre = (QK_NORM if "q_norm" in key or "k_norm" in key else 1.0) - (architecture == "gemma3_text")
        return centre + NORM_SCALE * draw
    return (1.0 if "embed_tokens" in key else WEIGHT_SCALE) * draw
