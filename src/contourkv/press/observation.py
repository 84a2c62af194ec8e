"""What a press sees of a layer while it attends: the mass that recent rows put on each key, and how far values lie."""

from __future__ import annotations

from typing import NamedTuple

import torch


class WindowMasses(NamedTuple):
    """What the last rows of a context put on each key; (B, H, N) each, float32 (float64 for float64 queries).

    Attributes
    ----------
    mean : over the rows and the query heads of a KV head: a probability vector, short of what sinks take
    peak : the largest of any of these rows: what is dropped of it bounds the dropped mass of every one of them
    """

    mean: torch.Tensor
    peak: torch.Tensor


def window_masses(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    held: torch.Tensor | None = None,
) -> WindowMasses:
    """Mass that the last rows of a context put on each key.

    The rows are the last `rows` query positions that are not padding, in every query head of a KV head. Memory is
    O(rows * N) a query head.

    Parameters
    ----------
    query : tensor (B, heads, Q, d)
        Of the last Q of the N keys.
    key : tensor (B, H, N, d)
        Query head h reads KV head h // (heads // H); both as attention gets them, rotary embedding applied.
    rows : int
        Query positions to look at; all there are if there are fewer.
    scaling : float
        Factor of the scores.
    window : int, optional
        A row of a sliding layer sees this many positions, its own included.
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    sinks : tensor (heads,), optional
        One more score of each head, whose key has the value zero.
    visible : bool tensor (B, Q), optional
        False at padding, which is no row.
    positions : int64 tensor (N,), optional
        Position of each key, ascending; 0 .. N - 1 by default.
    held : bool tensor (B, 1 or H, N), optional
        False where there is no such key: padding, or evicted from that head.

    Returns
    -------
    WindowMasses
    """
    sequences, heads, tokens, dim = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    rows = min(rows, tokens)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    at = torch.arange(keys, device=query.device) if positions is None else positions
    index = torch.arange(tokens, device=query.device)
    if visible is None:
        last = index[-rows:].expand(sequences, rows)
        counted = torch.ones_like(last, dtype=torch.bool)
        wanted = query[:, :, -rows:]
    else:
        last = torch.where(visible, index, -1).topk(rows, dim=1).values
        counted, last = last >= 0, last.clamp(min=0)
        wanted = query.gather(2, last[:, None, :, None].expand(sequences, heads, rows, dim))
    place = at[keys - tokens :][last]
    wanted = wanted.to(wide).reshape(sequences, kv_heads, group * rows, dim)
    scores = torch.matmul(wanted, key.to(wide).transpose(2, 3)).view(sequences, kv_heads, group, rows, keys)
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = at > place[:, :, None]
    if window is not None:
        hidden |= at <= place[:, :, None] - window
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if held is not None:
        scores.masked_fill_(~held[:, :, None, None], -torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = sinks.to(wide).view(1, kv_heads, group, 1, 1).expand(sequences, kv_heads, group, rows, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    weights = torch.where(counted[:, None, None, :, None], weights, 0.0)
    count = (group * counted.sum(dim=1).clamp(min=1)).view(sequences, 1, 1)
    return WindowMasses(weights.sum(dim=(2, 3)) / count, weights.amax(dim=(2, 3)))


def value_distances(masses: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How far each value lies from the mean output of the rows: ||v_j - mu||, mu = sum_j mass_j v_j.

    `masses` (B, H, N) as `window_masses` gives them, `value` (B, H, N, dv); returns (B, H, N) in the masses' dtype.
    mass_j * distance_j is the norm of the row's g_j (paper section 1), what dropping key j alone leaves in the sum.
    """
    value = value.to(masses.dtype)
    mean = torch.matmul(masses.unsqueeze(2), value) / masses.sum(dim=2)[..., None, None].clamp(min=1e-30)
    return torch.linalg.vector_norm(value - mean, dim=-1)
