"""Steps of decoding that never wait for the GPU: a model's forward pass over a ragged cache, as one CUDA graph.

with Steps(model, cache, room=256) as step:
    for _ in range(256):
        ids = step(ids)[:, -1:].argmax(-1)

A captured graph repeats the same launches with the same addresses and numbers. What changes from step to step therefore
lies in tensors: the new ids, their positions, and per layer the slots that they take and the length of the tail that
holds them (`Clock`). The tail's buffers get their room before, so that they stay where they are. The host counts along
and never asks.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import NamedTuple

import torch

from ..errors import InvalidInput
from ..operator import whole_number
from .cache import CACHE_ARGUMENTS, RaggedCache


class Clock(NamedTuple):
    """What layers whose tails are of the same length read in a step.

    Attributes
    ----------
    slots : int64 tensor (Q,), where the new tokens go in the tail
    length : int64 tensor (1,), of the tail with them
    """

    slots: torch.Tensor
    length: torch.Tensor

    def advance(self) -> None:
        """At the start of a step; a part of the captured graph."""
        torch.add(self.length, torch.arange(len(self.slots), device=self.slots.device), out=self.slots)
        self.length.add_(len(self.slots))


class Steps:
    """A model and a filled cache, ready to take `tokens` new tokens at a time without waiting for the device.

    On CUDA the first call runs the forward pass once to warm up, captures it as a graph and replays that; every later
    call copies the ids and replays. Elsewhere each call runs the same forward pass. What is computed is what
    `model(ids, past_key_values=cache)` computes. As long as this is open the cache takes nothing else that changes it
    (InvalidInput); once closed it has the tokens as if they had been fed one after another, and what is left of the
    room stays as slack until the next compaction.

    Parameters
    ----------
    model : a transformers model, in eval mode, whose layers lie on one device
    cache : RaggedCache
        Filled, without a press at work.
    room : int
        Most tokens of a sequence that can be fed in all.
    tokens : int
        New tokens of a sequence at each call. None of them is padding.
    position_ids : int64 tensor (B, tokens), optional
        Rotary positions of the first call's tokens, where they are not those of the cache (left-padded contexts);
        each call adds `tokens`.

    Raises
    ------
    InvalidInput
        An empty cache, one that a press watches, or one that other Steps have open; a model on another device or in
        training mode; numbers out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: RaggedCache,
        room: int,
        tokens: int = 1,
        position_ids: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InvalidInput(f"Steps: model: expected a transformers model, got {type(model).__name__}")
        if not isinstance(cache, RaggedCache) or not cache.is_initialized:
            raise InvalidInput("Steps: cache: expected a RaggedCache that has read a context")
        if model.training:
            raise InvalidInput("Steps: the model is in training mode; call model.eval() first")
        self.tokens, self.room = whole_number("tokens", tokens, 1), whole_number("room", room, 1)
        if self.room < self.tokens:
            raise InvalidInput(f"room: got {room}, expected at least tokens, {tokens}")
        first = cache.layers[0]
        self.device, sequences = first.device, first.begin.shape[0]
        for layer in cache.layers:
            layer._refuse_under_steps("Steps")
            if layer.watcher is not None:
                raise InvalidInput("Steps: a press watches this cache; leave its context first")
        devices = {p.device for p in model.parameters()} | {layer.device for layer in cache.layers}
        if devices != {self.device}:
            raise InvalidInput(f"Steps: model and cache lie on {sorted(map(str, devices))}; expected one device")
        shape = (sequences, self.tokens)
        if position_ids is None:
            position_ids = torch.arange(self.tokens).expand(shape) + cache.get_seq_length()
        _check_whole("position_ids", position_ids, shape)
        _check_range("position_ids", position_ids, None)
        self.model, self.cache, self.used = model, cache, 0
        taken = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_ARGUMENTS if name in taken), CACHE_ARGUMENTS[0])
        self._ids = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._positions = position_ids.to(self.device, torch.int64, copy=True)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None
        try:
            for layer in cache.layers:
                layer.reserve(self.room)
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "alloc" not in str(error):
                raise
            raise InvalidInput(
                f"room: no memory for {self.room} tokens in each of {len(cache.layers)} layers"
            ) from None
        self._clocks = {
            length: Clock(
                torch.zeros(self.tokens, dtype=torch.int64, device=self.device),
                torch.full((1,), length, device=self.device),
            )
            for length in {layer.tail_length for layer in cache.layers}
        }
        for layer in cache.layers:
            layer.clock = self._clocks[layer.tail_length]

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the cache back, and the graph's memory; harmless to repeat."""
        if self.cache is not None:
            for layer in self.cache.layers:
                layer.clock = None
        self.cache = self._graph = self._logits = None

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Feed `ids`, integers (B, tokens); logits (B, tokens, V), on CUDA the same tensor at every call.

        Raises
        ------
        InvalidInput
            Closed, another shape, or no room left.
        """
        if self.cache is None:
            raise InvalidInput("Steps: it is closed; make another")
        _check_whole("ids", ids, tuple(self._ids.shape))
        _check_range("ids", ids, self._vocabulary)
        if self.used + self.tokens > self.room:
            raise InvalidInput(f"Steps: {self.used} of the {self.room} tokens of its room are fed; make it larger")
        self._ids.copy_(ids, non_blocking=True)
        try:
            if self.device.type != "cuda":
                self._logits = self._forward()
            else:
                if self._graph is None:
                    self._capture()
                self._graph.replay()
        except BaseException:
            self.close()  # clocks and tails may differ by a part of a step now; the cache is as it was before it
            raise
        for layer in self.cache.layers:
            layer.counted(self.tokens)
        self.used += self.tokens
        return self._logits

    def _forward(self) -> torch.Tensor:
        """One step as the device does it: clocks, positions, the model."""
        for clock in self._clocks.values():
            clock.advance()
        given = {self._cache_name: self.cache}
        self.cache.stepping = True
        try:
            logits = self.model(self._ids, position_ids=self._positions, use_cache=True, **given).logits
        finally:
            self.cache.stepping = False
        self._positions.add_(self.tokens)
        return logits

    def _capture(self) -> None:
        before = self._positions.clone()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._forward()  # compiles and allocates what a capture may not
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._positions.copy_(before)
        for length, clock in self._clocks.items():
            clock.length.fill_(length)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward()
        self._graph = graph


def _check_whole(name: str, given: object, shape: tuple[int, int]) -> None:
    if not isinstance(given, torch.Tensor):
        raise InvalidInput(f"{name}: got {type(given).__name__}, expected a tensor of whole numbers {shape}")
    if given.shape != shape or given.is_floating_point() or given.dtype == torch.bool:
        raise InvalidInput(f"{name}: got {given.dtype} {tuple(given.shape)}, expected whole numbers {shape}")


def _check_range(name: str, given: torch.Tensor, below: int | None) -> None:
    """Of numbers on the CPU alone: elsewhere looking at them would wait for the device."""
    if given.device.type != "cpu":
        return
    least, most = int(given.min()), int(given.max())
    if least < 0 or (below is not None and most >= below):
        raise InvalidInput(
            f"{name}: got {least} to {most}, expected at least 0" + ("" if below is None else f" and below {below}")
        )
