"""What a press sees of a layer while it attends: the mass that recent rows put on each key, and how far values lie."""

from __future__ import annotations

import torch

from ..errors import InvalidInput


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
) -> torch.Tensor:
    """Mean mass that the last rows of a context put on each key.

    The mean is over the last `rows` positions that are not padding and over the query heads of a KV head, so it is
    itself a probability vector (short of what sinks take). Memory is O(rows * N) a query head.

    Parameters
    ----------
    query : tensor (B, heads, N, d)
    key : tensor (B, H, N, d)
        Query head h reads KV head h // (heads // H); both as attention gets them, positions applied.
    rows : int
        Query positions to look at; all there are if the context is shorter.
    scaling : float
        Factor of the scores.
    window : int, optional
        A row of a sliding layer sees this many keys, its own included.
    softcap : float, optional
        Scores become softcap * tanh(score / softcap).
    sinks : tensor (heads,), optional
        One more score of each head, whose key has the value zero.
    visible : bool tensor (B, N), optional
        False at padding, which is neither a row nor a key.

    Returns
    -------
    tensor (B, H, N), float32 (float64 for float64 queries)
    """
    sequences, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = min(rows, tokens)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    at = torch.arange(tokens, device=query.device)
    if visible is None:
        last = at[-rows:].expand(sequences, rows)
        counted = torch.ones_like(last, dtype=torch.bool)
        wanted = query[:, :, -rows:]
    else:
        last = torch.where(visible, at, -1).topk(rows, dim=1).values
        counted, last = last >= 0, last.clamp(min=0)
        wanted = query.gather(2, last[:, None, :, None].expand(sequences, heads, rows, dim))
    wanted = wanted.to(wide).reshape(sequences, kv_heads, group * rows, dim)
    scores = torch.matmul(wanted, key.to(wide).transpose(2, 3)).view(sequences, kv_heads, group, rows, tokens)
    scores = scores * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = at > last[:, :, None]
    if window is not None:
        hidden |= at <= last[:, :, None] - window
    if visible is not None:
        hidden |= ~visible[:, None, :]
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink = sinks.to(wide).view(1, kv_heads, group, 1, 1).expand(sequences, kv_heads, group, rows, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    weights = torch.where(counted[:, None, None, :, None], weights, 0.0)
    return weights.sum(dim=(2, 3)) / (group * counted.sum(dim=1).clamp(min=1)).view(sequences, 1, 1)


def value_distances(masses: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How far each value lies from the mean output of the rows: ||v_j - mu||, mu = sum_j mass_j v_j.

    `masses` (B, H, N) as `window_masses` gives them, `value` (B, H, N, dv); returns (B, H, N) in the masses' dtype.
    mass_j * distance_j is the norm of the row's g_j (paper section 1), what dropping key j alone leaves in the sum.
    """
    value = value.to(masses.dtype)
    mean = torch.matmul(masses.unsqueeze(2), value) / masses.sum(dim=2)[..., None, None].clamp(min=1e-30)
    return torch.linalg.vector_norm(value - mean, dim=-1)


def output_distances(masses: torch.Tensor, value: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """The same distances where the model feels them: behind the output projection, ||W_h (v_j - mu)||.

    `projection` (hidden, heads * dv) is the layer's o_proj.weight; W_h is the slice of a query head, and the norm is
    the root mean square over the query heads of the KV head. Costs O(N dv^2) a KV head.
    """
    _, kv_heads, _, dim = value.shape
    if projection.dim() != 2 or projection.shape[1] % (kv_heads * dim):
        raise InvalidInput(
            f"output weights: the output projection is {tuple(projection.shape)}, expected (hidden, heads * {dim}) "
            f"with heads a multiple of {kv_heads}"
        )
    value = value.to(masses.dtype)
    mean = torch.matmul(masses.unsqueeze(2), value) / masses.sum(dim=2)[..., None, None].clamp(min=1e-30)
    slices = projection.to(masses.dtype).view(projection.shape[0], kv_heads, -1, dim)
    gram = torch.einsum("ohgd,ohge->hde", slices, slices) / slices.shape[2]
    off = value - mean
    squared = (torch.matmul(off, gram) * off).sum(dim=-1)
    return squared.clamp(min=0).sqrt()
