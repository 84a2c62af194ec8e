"""RaggedCache: a transformers Cache whose KV heads hold different numbers of keys, and only those.

cache = RaggedCache(model.config)
with ContourKVPress(budget=0.25)(model):
    model(context_ids, past_key_values=cache)
model.generate(torch.cat([context_ids, question_ids], -1), past_key_values=cache)
cache.rollback()  # the next question finds the compressed context again
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache

from ..errors import ContourKVError, InvalidInput, said
from ..operator import whole_number
from ..plain import parse_json
from ..provenance import VERSION, atomic_path
from .layer import RaggedLayer

CACHE_ARGUMENTS = ("past_key_values", "cache")  # what a model calls its cache: transformers 5.2; newer
FORMAT = "contourkv ragged cache 1"
# What must agree between the model that filled a saved cache and the one that goes on with it.
FACTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "rope_theta",
    "rope_parameters",
)


class Watcher(Protocol):
    """Sees a layer's queries and keys while it attends, as a press does to score keys."""

    def first_block(
        self,
        layer: RaggedLayer,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        weights: torch.Tensor | None,
        visible: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> None:
        """Called once a layer, after it attended to its first tokens and before it lets go of any."""

    def later_block(
        self,
        layer: RaggedLayer,
        module: torch.nn.Module,
        query: torch.Tensor,
        visible: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> None:
        """Called after a layer that held keys already attended to more; they are in its tail."""


class RaggedCache(Cache):
    """A KV cache with one copy per KV head and a length of its own in each of them.

    Fits where transformers takes a cache: `model(...)`, `generate` (its convention for a filled cache: the ids of
    everything, context included; for beams call `batch_repeat_interleave(num_beams)` first), prompts fed in chunks,
    left-padded batches, several turns. `get_seq_length` is the true length. Nothing is evicted unless a press, or
    `evict`, says so; a sliding layer holds what its window can still show. Inference only: no gradient flows through.

    Parameters
    ----------
    config : a transformers config
        Of the model, `model.config`.

    Raises
    ------
    InvalidInput
        The architecture does not attend through transformers' registry, shares keys between layers, or has layers
        that are neither full nor sliding attention.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.windows = layer_windows(config)
        self.model_type = config.get_text_config(decoder=True).model_type
        count = len(self.windows)
        super().__init__(
            layers=[RaggedLayer(index, window, self.model_type, count) for index, window in enumerate(self.windows)]
        )
        self.stepping = False  # whether the forward pass at work is that of `Steps`
        self._facts = {name: getattr(config.get_text_config(decoder=True), name, None) for name in FACTS}

    def __repr__(self) -> str:
        if not self.is_initialized:
            return f"RaggedCache({self.model_type}, {len(self.layers)} layers, empty)"
        sequences = self.layers[0].begin.shape[0]
        entries = sum(int(layer.lengths().sum()) for layer in self.layers)
        return (
            f"RaggedCache({self.model_type}, {len(self.layers)} layers, {sequences} sequence(s) of "
            f"{self.get_seq_length()} tokens, {entries} entries)"
        )

    @property
    def is_initialized(self) -> bool:
        return all(layer.length for layer in self.layers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values; raise InvalidInput if an earlier forward pass did not get through."""
        if layer_idx >= len(self.layers):
            raise InvalidInput(
                f"RaggedCache: it has {len(self.layers)} layers, the model has more; make one from this model's config"
            )
        if layer_idx == 0:
            if not self.stepping:
                self.layers[0]._refuse_under_steps("RaggedCache")
            lengths = {layer.length for layer in self.layers}
            if len(lengths) > 1:
                raise InvalidInput(
                    f"RaggedCache: its layers hold {' and '.join(map(str, sorted(lengths)))} tokens, so a forward pass "
                    "was interrupted; rollback() to the compressed context, or reset()"
                )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def entries(self) -> list[torch.Tensor]:
        """Entries held in each sequence and KV head, one int64 tensor (B, H) a layer."""
        return [layer.lengths() for layer in self.layers]

    def kept_positions(self, layer: int, sequence: int, kv_head: int) -> torch.Tensor:
        """Positions whose entries a KV head holds, ascending, int64 on the CPU."""
        held = self._layer(layer, "kept_positions")
        held._check_filled("kept_positions")
        sequences, heads = held.begin.shape
        if whole_number("sequence", sequence, 0) >= sequences or whole_number("kv_head", kv_head, 0) >= heads:
            raise InvalidInput(
                f"kept_positions: got sequence {sequence} and KV head {kv_head}, the cache has {sequences} and {heads}"
            )
        run = slice(int(held.begin[sequence, kv_head]), int(held.end[sequence, kv_head]))
        tail = torch.arange(held.tail_first, held.tail_first + held.tail_length)
        if held.tail_visible is not None:
            tail = tail[held.tail_visible[sequence, : held.tail_length].cpu()]
        return torch.cat([held.positions[run].cpu().long(), tail])

    def evict(self, layer: int, keep: torch.Tensor) -> None:
        """Keep in one layer the entries that `keep` names, bool (B, H, tokens seen); free the others at once."""
        self._layer(layer, "evict").evict(keep)

    def _layer(self, index: int, what: str) -> RaggedLayer:
        if whole_number(f"{what}: layer", index, 0) >= len(self.layers):
            raise InvalidInput(f"{what}: layer: got {index}, the cache has {len(self.layers)} layers")
        return self.layers[index]

    def take(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor, length: int | None = None
    ) -> None:
        """Fill an empty layer with some entries of rectangular keys (B, H, N, d) and values (B, H, N, dv).

        `keep` is bool (B, H, N); `length` the tokens seen, by default N (key n has position length - N + n). Of one
        sequence (1, H, N, d), `keep` may name B kept sets, for a batch of B.
        """
        self._layer(layer, "take").take(keys, values, keep, keys.shape[2] if length is None else length)

    def copy(self) -> RaggedCache:
        """Another cache with the same contents. The frozen parts are shared until one of the two evicts."""
        twin = copy.copy(self)
        twin.layers = [layer.copy() for layer in self.layers]
        return twin

    def mark(self) -> None:
        """Make this the state that `rollback` returns to. A press does so when it has compressed."""
        if not self.is_initialized:
            raise InvalidInput("mark: the cache is empty; feed it a context first")
        for layer in self.layers:
            layer.mark()

    def rollback(self) -> None:
        """Back to the mark: what was appended since is gone, its memory too, in time that does not grow with it.

        Raises
        ------
        InvalidInput
            There is no mark: nothing was compressed, and `mark` was not called.
        """
        if any(layer.marked_length is None for layer in self.layers):
            raise InvalidInput(
                "rollback: the cache has no mark; compress a context with a press, or call mark() after feeding one"
            )
        for layer in self.layers:
            layer.rollback()

    def crop(self, max_length: int) -> None:
        """Forget the last tokens, in the meaning of the installed transformers.

        A negative number removes that many tokens. transformers 5.2 takes a positive one as the length to keep; newer
        versions refuse it, and so does this. Cropping into the compressed context evicts there too and lifts the
        mark; behind the window of a sliding layer it is refused.
        """
        for layer in self.layers:
            layer.crop(max_length)

    def save(self, path: str | PathLike) -> None:
        """Write everything that is held to a safetensors file; `load` reads it back.

        Raises
        ------
        InvalidInput
            The cache is empty; there is no such folder, or something that is no file has that name.
        """
        if not self.is_initialized:
            raise InvalidInput("save: the cache is empty; feed it a context first")
        if not isinstance(path, str | PathLike):
            raise InvalidInput(f"save: expected a path, got {type(path).__name__}")
        path = Path(path)
        if not path.parent.is_dir():
            raise InvalidInput(f"save: {path}: there is no folder {path.parent}; make it first")
        if path.exists() and not path.is_file():
            raise InvalidInput(f"save: {path}: not a file; give the name of a file")
        tensors, layers = {}, []
        for index, layer in enumerate(self.layers):
            source, _ = layer._entries()
            used = layer.tail_length
            ends = (layer.end - layer.begin).view(-1).cumsum(0).view(layer.begin.shape)
            tensors |= {
                f"{index}.keys": layer.frozen_keys[source],
                f"{index}.values": layer.frozen_values[source],
                f"{index}.positions": layer.positions[source],
                f"{index}.end": ends,
            }
            if used:
                tensors[f"{index}.tail_keys"] = layer.tail_keys[:, :, :used].contiguous()
                tensors[f"{index}.tail_values"] = layer.tail_values[:, :, :used].contiguous()
                if layer.tail_visible is not None:
                    tensors[f"{index}.tail_visible"] = layer.tail_visible[:, :used].contiguous()
            layers.append({"length": layer.length, "tail_first": layer.tail_first, "marked": layer.marked_length})
        described = {
            "format": FORMAT,
            "model_type": self.model_type,
            "windows": self.windows,
            "facts": self._facts,
            "layers": layers,
            "version": VERSION,
            "digest": _digest(tensors),
        }
        with atomic_path(path) as partial:
            # One entry: safetensors writes several in no fixed order.
            save_file(tensors, partial, metadata={"cache": json.dumps(described)})

    @classmethod
    def load(
        cls, path: str | PathLike, config: PreTrainedConfig, device: str | torch.device | Sequence = "cpu"
    ) -> RaggedCache:
        """Read a file that `save` wrote, for the model of `config`.

        Parameters
        ----------
        device : of all layers, or a list with one for each

        Raises
        ------
        InvalidInput
            No such file, not such a file, damaged, or of another model.
        """
        if not isinstance(path, str | PathLike):
            raise InvalidInput(f"load: expected a path, got {type(path).__name__}")
        cache = cls(config)
        devices = [device] * len(cache.layers) if isinstance(device, str | torch.device) else list(device)
        if len(devices) != len(cache.layers):
            raise InvalidInput(f"device: got {len(devices)} devices for {len(cache.layers)} layers")
        for each in set(map(str, devices)):
            try:
                usable = torch.empty(0, device=each).device.type != "meta"
            except (RuntimeError, AssertionError):
                usable = False
            if not usable:
                raise InvalidInput(f"device: {each!r} cannot be used here")
        try:
            with safe_open(Path(path), framework="pt") as file:
                described = parse_json((file.metadata() or {}).get("cache", "{}"))
                if described.get("format") != FORMAT:
                    raise InvalidInput(f"{path}: not a saved RaggedCache of this version (expected {FORMAT!r})")
                if (described["model_type"], described["windows"]) != (cache.model_type, cache.windows):
                    raise InvalidInput(
                        f"{path}: holds the cache of a {said(described['model_type'])} of {len(described['windows'])} "
                        f"layers, the model is a {cache.model_type} of {len(cache.layers)}"
                    )
                for name, value in json.loads(json.dumps(cache._facts)).items():
                    if described["facts"][name] != value:
                        raise InvalidInput(
                            f"{path}: was made with {name} {said(described['facts'][name])}, the model has {value}"
                        )
                tensors = {name: file.get_tensor(name) for name in file.keys()}
                if _digest(tensors) != described["digest"]:
                    raise InvalidInput(f"{path}: damaged: its contents are not those that were saved; save it again")
                for index, (layer, facts) in enumerate(zip(cache.layers, described["layers"], strict=True)):
                    prefix = f"{index}."
                    parts = {n.removeprefix(prefix): part for n, part in tensors.items() if n.startswith(prefix)}
                    layer.restore(parts, facts, torch.device(devices[index]))
        except FileNotFoundError:
            raise InvalidInput(f"{path}: no such file") from None
        except (SafetensorError, json.JSONDecodeError, KeyError, TypeError, ValueError, OSError) as error:
            if isinstance(error, ContourKVError):
                raise error if str(path) in str(error) else InvalidInput(f"{path}: {error}") from None
            raise InvalidInput(f"{path}: damaged, or not a saved RaggedCache ({said(error)}); save it again") from None
        if len({layer.length for layer in cache.layers}) != 1:
            raise InvalidInput(f"{path}: damaged: its layers disagree about the tokens seen; save it again")
        return cache


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names and contents."""
    seen = hashlib.sha256()
    for name in sorted(tensors):
        seen.update(name.encode())
        seen.update(tensors[name].contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return seen.hexdigest()


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each layer, None where it attends to everything; raises InvalidInput as RaggedCache does."""
    if not isinstance(config, PreTrainedConfig):
        raise InvalidInput(f"RaggedCache: expected a model's config, model.config, got {type(config).__name__}")
    config = config.get_text_config(decoder=True)
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise InvalidInput(f"RaggedCache: {name} is an encoder-decoder; only decoders are supported")
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known or not getattr(known[type(config)], "_supports_attention_backend", False):
        raise InvalidInput(f"RaggedCache: {name} does not attend through transformers' attention registry")
    if getattr(config, "num_kv_shared_layers", 0):
        raise InvalidInput(f"RaggedCache: {name} shares keys between layers, which is not supported")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            raise InvalidInput(f"RaggedCache: {name} attends in chunks, which is not supported")
        return [window] * config.num_hidden_layers
    for index, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise InvalidInput(f"RaggedCache: layer {index} of {name} is {kind!r}, expected full or sliding attention")
    return [window if kind == "sliding_attention" else None for kind in kinds]
