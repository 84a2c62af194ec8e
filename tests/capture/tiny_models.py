"""Tiny random models of every supported architecture, built from transformers' config classes."""

from __future__ import annotations

import torch
import transformers

WINDOW = 24
VOCABULARY = 97
SPECIAL: dict[str, dict] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "attention_bias": True},
    "olmo2": {},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
WINDOWS = {
    "qwen2": [None, WINDOW],
    "gemma3_text": [WINDOW, None],
    "gemma2": [WINDOW, None],
    "gpt_oss": [WINDOW, None],
}
EAGER = ("gemma2", "gpt_oss")
NORMED = ("olmo2", "qwen3", "gemma3_text")  # QK-norm: scaling a projection would change nothing


def build(architecture: str, dtype: torch.dtype = torch.float32, **special: object) -> transformers.PreTrainedModel:
    """A two-layer random model, on the CPU in evaluation mode, whose rows are neither flat nor one-hot."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        **SPECIAL.get(architecture, {}),
        **special,
    }
    config = transformers.AutoConfig.for_model(architecture, **settings)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")) and architecture not in NORMED:
                weight.mul_(20)
            elif name.endswith("q_norm.weight"):
                weight.add_(2)
            elif name.endswith(("bias", "sinks")):
                weight.normal_(std=0.5)
    return model


def ids_of(length: int, seed: int = 3) -> list[int]:
    """`length` random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
