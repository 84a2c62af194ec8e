"""What tests of caches and presses share: tiny models ready to generate, ids, padded batches."""

from __future__ import annotations

import torch
import transformers
from capture.tiny_models import EAGER, SPECIAL, build, ids_of

ARCHITECTURES = tuple(SPECIAL)
TOLERANCE = 1e-4  # float32 logits


def built(architecture: str, **special: object) -> transformers.PreTrainedModel:
    """A tiny random model that generates to the length asked for, attending eagerly where its architecture must."""
    model = build(architecture, eos_token_id=None, **special)
    if architecture in EAGER:
        model.set_attn_implementation("eager")
    return model


def ids(length: int, seed: int = 3) -> torch.Tensor:
    """Random ids (1, length)."""
    return torch.tensor([ids_of(length, seed)])


def left_padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of texts (1, n) of unequal length, and its attention mask."""
    longest = max(text.shape[1] for text in texts)
    batch = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, text in enumerate(texts):
        batch[row, longest - text.shape[1] :] = text
        mask[row, longest - text.shape[1] :] = 1
    return batch, mask
