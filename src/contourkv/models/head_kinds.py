"""What the heads of a model attend to: the first key, the last few, or what followed the same token before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEAR = 8


def head_kinds(model: PreTrainedModel, contexts: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
    """Mean attention mass of each head on three kinds of keys, over the later half of the query positions.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode, with full attention in every layer.
    contexts : sequence of token ids

    Returns
    -------
    dict of str to lists (layers, heads) of float64, in [0, 1]
        `first`: on key 0. `near`: on the query's own key and the seven before it. `induction`: on the keys that come
        right after an earlier key of the query's own token, over the queries that have one; `induction_uniform`, one
        number for all heads, is what uniform attention would put there.
    """
    import torch

    implementation = model.config._attn_implementation
    sums, queries, matched, uniform = {}, 0, 0, 0.0
    model.set_attn_implementation("eager")
    try:
        for ids in contexts:
            tokens = np.asarray(ids)
            later = np.arange(tokens.size // 2, tokens.size)
            # key j >= 1 follows a key of the query's token
            after = np.zeros((later.size, tokens.size), bool)
            after[:, 1:] = tokens[None, :-1] == tokens[later, None]
            after &= np.arange(tokens.size)[None] <= later[:, None]
            has = after.any(1)
            with torch.no_grad():
                layers = model(torch.tensor([list(ids)]), use_cache=False, output_attentions=True).attentions
            for kind in ("first", "near", "induction"):
                sums.setdefault(kind, np.zeros((len(layers), layers[0].shape[1])))
            for number, layer in enumerate(layers):
                rows = layer[0, :, later].double().numpy()
                sums["first"][number] += rows[:, :, 0].sum(1)
                for step in range(NEAR):
                    sums["near"][number] += rows[:, np.arange(later.size), np.maximum(later - step, 0)].sum(1)
                sums["induction"][number] += (rows[:, has] * after[has]).sum((1, 2))
            queries += later.size
            matched += int(has.sum())
            uniform += float((after[has].sum(1) / (later[has] + 1)).sum())
    finally:
        model.set_attn_implementation(implementation)
    divide = {"first": queries, "near": queries, "induction": max(matched, 1)}
    kinds = {kind: (total / divide[kind]).round(4).tolist() for kind, total in sums.items()}
    return {**kinds, "induction_uniform": round(uniform / max(matched, 1), 4)}


def nats_of_repeats(model: PreTrainedModel, contexts: Sequence[Sequence[int]], lead: Sequence[int] = ()) -> dict:
    """Mean loss on texts read twice in a row: what a model that looks back saves the second time.

    Parameters
    ----------
    model : PreTrainedModel
    contexts : sequence of token ids
        Each is cut to its first half.
    lead : token ids that come before, such as BOS

    Returns
    -------
    dict
        `first`, `second`: nats per token of the first and of the second reading, float64, without the first token
        of either.
    """
    import torch

    sums, count, start = {"first": 0.0, "second": 0.0}, 0, len(lead)
    for ids in contexts:
        half = list(ids)[: (len(ids) - start) // 2]
        row = torch.tensor([[*lead, *half, *half]])
        with torch.no_grad():
            logits = model(row, use_cache=False).logits[0, :-1].double()
        nats = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        size = len(half)
        sums["first"] += float(nats[start : start + size - 1].sum())
        sums["second"] += float(nats[start + size : start + 2 * size - 1].sum())
        count += size - 1
    return {reading: total / count for reading, total in sums.items()}
