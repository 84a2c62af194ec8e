"""Asking a batch of caches one question: greedy answers, or how likely the gold answer is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

LOGIT_BYTES = 400_000_000  # of logits at once


def answers(
    model: PreTrainedModel, cache: Cache, ids: Sequence[int], at: int, count: int, most: int, ends: frozenset[int]
) -> list[list[int]]:
    """Greedy answers of `count` sequences to the same question.

    Parameters
    ----------
    cache : holds the context of all sequences
    ids : the question, at least one token
    at : position of its first token: tokens of the context, whatever is kept of them
    most : tokens generated
    ends : tokens that end an answer

    Returns
    -------
    list of token lists, each up to and without an ending token
    """
    device = model.device
    given = torch.tensor(ids, device=device).expand(count, -1)
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for step in range(most):
            places = torch.arange(at, at + given.shape[1], device=device).expand(count, -1)
            logits = model(given, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
            at += given.shape[1]
            given = logits[:, -1].argmax(dim=-1, keepdim=True)
            found.append(given)
            if step + 1 < most and _all_ended(found, ends):
                break
    rows = torch.cat(found, dim=1).tolist()
    return [_until(row, ends) for row in rows]


def nats(
    model: PreTrainedModel, cache: Cache, ids: Sequence[int], gold: Sequence[int], at: int, count: int
) -> list[float]:
    """Mean negative log-likelihood of each gold token after the question, teacher-forced, for `count` sequences.

    Parameters as of `answers`; `gold` holds at least one token. Logits as the model computes them, the rest in float64.
    """
    device = model.device
    given = torch.tensor([*ids, *gold[:-1]], device=device).expand(count, -1)
    places = torch.arange(at, at + given.shape[1], device=device).expand(count, -1)
    target = torch.tensor(gold, device=device)
    with torch.no_grad():
        logits = model(given, past_key_values=cache, position_ids=places, logits_to_keep=len(gold)).logits
    found = []
    for row in logits:
        wide = row.double()
        likelihood = wide.gather(1, target[:, None]).squeeze(1) - torch.logsumexp(wide, dim=1)
        found.append(-float(likelihood.mean()))
    return found


def most_at_once(model: PreTrainedModel, gold: int) -> int:
    """Sequences whose logits of `gold` tokens fit into LOGIT_BYTES."""
    return max(1, LOGIT_BYTES // (4 * max(1, gold) * model.config.get_text_config(decoder=True).vocab_size))


def ending_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end an answer, as the model's generation configuration says."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    return frozenset(named if isinstance(named, list) else [] if named is None else [named])


def _all_ended(found: list[torch.Tensor], ends: frozenset[int]) -> bool:
    if not ends:
        return False
    rows = torch.cat(found, dim=1)
    return bool(torch.isin(rows, torch.tensor(sorted(ends), device=rows.device)).any(dim=1).all())


def _until(row: list[int], ends: frozenset[int]) -> list[int]:
    end = next((index for index, token in enumerate(row) if token in ends), len(row))
    return row[:end]
