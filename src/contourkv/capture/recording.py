"""Rows out of one forward pass, through transformers' attention registry.

While `recording` holds a model, its layers call an attention function that is registered here. It computes the
model's own output with transformers' own attention (SDPA, or the architecture's eager one where a soft cap or
sinks ask for it) under transformers' own mask, and beside it, independently, the few rows that are wanted:
scores from q at those positions and all keys in float32, softmax in float64, visibility from the positions and
the sliding window. p V must then give the model's own output. Memory is O(rows * N) a head.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from ..errors import ContourKVError, InvalidInput, InvariantBroken
from ..models.eager import eager_attention
from ..models.geometry import AttentionGeometry, attention_geometry
from ..operator import SUM_TOLERANCE
from .rows import LayerRows

# The registered name says which of transformers' attentions computes the model's output, so that the mask
# function needs no wrapper: it is transformers' own.
OVER_SDPA = "contourkv_capture"
OVER_EAGER = "contourkv_capture_eager"

EAGER_BLOCK = 128  # query positions at a time, so that eager attention never holds N x N scores a head

_FULL, _HALF = 1e-3, 2e-2
TOLERANCE = {torch.float64: _FULL, torch.float32: _FULL, torch.bfloat16: _HALF, torch.float16: _HALF}

_recorder: ContextVar[Recorder | None] = ContextVar("contourkv_recorder", default=None)
_switch = threading.Lock()


def capture_rows(
    model: PreTrainedModel,
    ids: Sequence[int],
    positions: Sequence[int],
    name: str | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> list[LayerRows]:
    """Attention rows of every layer and query head at some positions, and the values of every KV head.

    One forward pass of a batch of one without a KV cache; the vocabulary's logits are not computed.

    Parameters
    ----------
    model : transformers model of a supported architecture, with or without its language-model head
    ids : N token ids
    positions : query positions in [0, N), distinct; rows come in this order
    name : what errors call the model; default its folder, else its architecture
    on_layer : called with the layer's number when its rows are there

    Returns
    -------
    list of LayerRows, one a layer

    Raises
    ------
    InvalidInput
        Before any compute: unsupported architecture, empty context, context longer than the model's window,
        token id outside the vocabulary, a position outside the context or named twice.
    InvariantBroken
        p V differs from the model's attention output by more than 1e-3 (float32) or 2e-2 (bfloat16, float16)
        relative, the weights do not sum to 1, or a number is not finite; names model, layer, head, position.
    """
    geometry = attention_geometry(model.config)
    name = name or getattr(model.config, "_name_or_path", "") or geometry.architecture
    ids = check_ids(ids, geometry, model.config.vocab_size, name)
    recorder = Recorder(geometry, len(ids), positions, name, on_layer)
    inputs = torch.tensor([ids], dtype=torch.long, device=model.device)
    with torch.no_grad(), recording(model, recorder):
        model.base_model(input_ids=inputs, use_cache=False)
    return recorder.layers()


@contextlib.contextmanager
def recording(model: PreTrainedModel, recorder: Recorder) -> Iterator[Recorder]:
    """Let every forward pass of `model` inside the block, in this thread, report its attention to `recorder`.

    The model has its former attention implementation back afterwards, whatever ends the block. A forward
    pass of the model in another thread meanwhile is computed by the same attention, and not recorded.
    """
    used = OVER_EAGER if recorder.geometry.eager else OVER_SDPA
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    with _switch:
        former = [config._attn_implementation for config in configs]
        if OVER_SDPA in former or OVER_EAGER in former:
            raise ContourKVError(f"model {recorder.name}: its attention is being recorded already by another call")
        for config in configs:
            config._attn_implementation = used
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)
        with _switch:
            for config, implementation in zip(configs, former, strict=True):
                config._attn_implementation = implementation


class Recorder:
    """Takes the rows of each layer out of one forward pass, and checks them there.

    Parameters
    ----------
    geometry : of the model
    length : N, tokens of the context
    positions : query positions in [0, N), distinct
    name : what errors call the model
    on_layer : called with the layer's number when its rows are there
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        length: int,
        positions: Sequence[int],
        name: str,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        self.geometry, self.length, self.name, self.on_layer = geometry, length, name, on_layer
        self.positions = check_positions(positions, length)
        self._layers: dict[int, LayerRows] = {}

    def layers(self) -> list[LayerRows]:
        """Rows of all layers; raises ContourKVError if the forward pass left one out."""
        missing = [layer for layer in range(self.geometry.layers) if layer not in self._layers]
        if missing:
            raise ContourKVError(
                f"model {self.name}: its forward pass did not call the registered attention function in layers "
                f"{missing}; this version of transformers may have changed how {self.geometry.architecture} attends"
            )
        return [self._layers[layer] for layer in range(self.geometry.layers)]

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Compute and keep the rows of the layer that `module` is.

        `query` (1, heads, N, d), `key` and `value` (1, kv_heads, N, d) as the model's attention got them,
        `output` (1, N, heads, d) as the model goes on with, `sinks` (heads,) scores.
        """
        geometry, layer = self.geometry, module.layer_idx
        heads, kv_heads, length, count = geometry.heads, geometry.kv_heads, self.length, len(self.positions)
        head_dim = geometry.head_dim
        if tuple(query.shape) != (1, heads, length, head_dim) or tuple(key.shape) != (
            1,
            kv_heads,
            length,
            head_dim,
        ):
            raise ContourKVError(
                f"model {self.name}, layer {layer}: expected queries (1, {heads}, {length}, {head_dim}) and keys "
                f"(1, {kv_heads}, {length}, {head_dim}), got {tuple(query.shape)} and {tuple(key.shape)}"
            )
        if (softcap, sinks is not None) != (geometry.softcap, geometry.sinks):
            raise ContourKVError(
                f"model {self.name}, layer {layer}: soft cap {softcap} and sinks {sinks is not None} in the forward "
                f"pass, {geometry.softcap} and {geometry.sinks} by the config"
            )
        window = geometry.windows[layer]
        first = np.zeros(count, np.int64) if window is None else np.maximum(self.positions - window + 1, 0)
        device = query.device
        last, begin = (torch.from_numpy(bound).to(device) for bound in (self.positions, first))
        self._check_values(layer, value[0], first)

        wanted = query[0, :, last].float().reshape(kv_heads, geometry.group * count, head_dim)
        scores = torch.matmul(wanted, key[0].float().transpose(1, 2)).view(heads, count, length)
        scores = scores * (head_dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        keys = torch.arange(length, device=device)
        hidden = (keys > last[:, None]) | (keys < begin[:, None])
        scores = scores.double().masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(heads, 1, 1).expand(heads, count, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)
        del scores
        self._check_weights(layer, weights)
        p, sink = weights[..., :length], None if sinks is None else weights[..., length]

        outputs = torch.matmul(p.reshape(kv_heads, geometry.group * count, length), value[0].double())
        error = self._check_output(
            layer, outputs.view(heads, count, head_dim), output[0, last].transpose(0, 1).double(), query.dtype
        )
        self._layers[layer] = LayerRows(
            layer=layer,
            p=p.transpose(0, 1).contiguous().cpu().numpy(),
            # A copy: a view would keep, or follow, a tensor that belongs to the model.
            v=value[0].detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format).numpy(),
            positions=self.positions,
            first_visible=first,
            window=window,
            max_relative_error=error,
            sink=None if sink is None else sink.transpose(0, 1).contiguous().cpu().numpy(),
        )
        if self.on_layer is not None:
            self.on_layer(layer)

    def _check_values(self, layer: int, value: torch.Tensor, first: np.ndarray) -> None:
        finite = torch.isfinite(value).all(dim=-1)
        if finite.all():
            return
        kv_head, key = (int(index) for index in torch.nonzero(~finite)[0])
        seen = self.positions[(first <= key) & (key <= self.positions)]
        row = f"in the row of position {seen[0]}" if len(seen) else "in no row"
        raise InvariantBroken(
            f"model {self.name}, layer {layer}, head {kv_head * self.geometry.group} (KV head {kv_head}): the value "
            f"of key {key}, {row}, is not finite; check the weights, or load the model in float32"
        )

    def _check_weights(self, layer: int, weights: torch.Tensor) -> None:
        finite = torch.isfinite(weights).all(dim=-1)
        if not finite.all():
            head, row = (int(index) for index in torch.nonzero(~finite)[0])
            raise InvariantBroken(
                f"model {self.name}, layer {layer}, head {head}: the weights of the row of position "
                f"{self.positions[row]} are not finite; check the weights, or load the model in float32"
            )
        off = (weights.sum(dim=-1) - 1).abs()
        if off.max() > SUM_TOLERANCE:
            head, row = divmod(int(off.argmax()), len(self.positions))
            raise InvariantBroken(
                f"model {self.name}, layer {layer}, head {head}: the weights of the row of position "
                f"{self.positions[row]} sum to 1 {off.max():+.3g}"
            )

    def _check_output(self, layer: int, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> float:
        norm = torch.linalg.vector_norm(theirs, dim=-1)
        distance = torch.linalg.vector_norm(ours - theirs, dim=-1)
        # Values that are all zero give an output of zero, which zero reproduces.
        relative = torch.where((norm == 0) & (distance == 0), 0.0, distance / norm)
        worst = float(relative.max())
        if not worst <= TOLERANCE[dtype]:
            head, row = divmod(int(relative.argmax()), len(self.positions))
            raise InvariantBroken(
                f"model {self.name}, layer {layer}, head {head}, position {self.positions[row]}: p V is off the "
                f"model's own attention output by {worst:.3g} relative, allowed in "
                f"{str(dtype).removeprefix('torch.')} is {TOLERANCE[dtype]:g}"
                + ("" if dtype in (torch.float32, torch.float64) else "; load the model in float32")
            )
        return worst


def _whole(name: str, given: Sequence[int]) -> list[int]:
    try:
        return [operator.index(number) for number in given]
    except TypeError as error:
        raise InvalidInput(f"{name}: expected a sequence of whole numbers ({error})") from None


def check_ids(ids: Sequence[int], geometry: AttentionGeometry, vocabulary: int, name: str) -> list[int]:
    """Return `ids` as a list of int; raise InvalidInput unless the model can read them."""
    ids = _whole("ids", ids)
    if not ids:
        raise InvalidInput("ids: the context is empty, expected at least one token")
    if len(ids) > geometry.max_positions:
        raise InvalidInput(
            f"ids: the context has {len(ids)} tokens, the window of model {name} holds {geometry.max_positions}; "
            "make it shorter"
        )
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidInput(
            f"ids: token {wrong} is not in the vocabulary of model {name} (0..{vocabulary - 1}); "
            "was the context made with another model's tokenizer?"
        )
    return ids


def check_positions(positions: Sequence[int], length: int) -> np.ndarray:
    """Return `positions` as (R,) int64; raise InvalidInput unless they are distinct and in [0, length)."""
    positions = _whole("positions", positions)
    if not positions:
        raise InvalidInput("positions: expected at least one query position")
    wrong = next((position for position in positions if not 0 <= position < length), None)
    if wrong is not None:
        raise InvalidInput(f"positions: {wrong} lies outside the context of {length} tokens, expected 0..{length - 1}")
    twice = next((position for at, position in enumerate(positions) if position in positions[:at]), None)
    if twice is not None:
        raise InvalidInput(f"positions: {twice} is named twice")
    return np.array(positions, dtype=np.int64)


def _report(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    kwargs: dict,
) -> None:
    recorder = _recorder.get()
    if recorder is None:
        return
    if kwargs.get("dropout"):
        raise InvalidInput(f"model {recorder.name}: it drops attention weights at random; call model.eval() first")
    recorder.record(
        module, query, key, value, output, kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")
    )


def _attend_over_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    kwargs["dropout"] = dropout  # some wrappers of registered functions hand it on by place
    output, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)
    _report(module, query, key, value, output, kwargs)
    return output, weights


def _attend_over_eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    kwargs["dropout"] = dropout
    attend = eager_attention(module)
    blocks = []
    for start in range(0, query.shape[2], EAGER_BLOCK):
        rows = slice(start, start + EAGER_BLOCK)
        mask = None if attention_mask is None else attention_mask[:, :, rows]
        blocks.append(attend(module, query[:, :, rows], key, value, mask, **kwargs)[0])
    output = torch.cat(blocks, dim=1)
    _report(module, query, key, value, output, kwargs)
    return output, None


for _name, _attend, _mask in (
    (OVER_SDPA, _attend_over_sdpa, "sdpa"),
    (OVER_EAGER, _attend_over_eager, "eager"),
):
    ALL_ATTENTION_FUNCTIONS.register(_name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_mask])
