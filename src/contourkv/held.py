"""Bytes that a cache really holds: every storage that it owns, once, whole.

A shape says how many numbers a tensor shows; its storage says how much memory is kept for them. The two part
wherever a layer keeps a view of a larger buffer, allocates ahead, or leaves its selection as index tensors.
So everything reachable from a cache is walked, whatever its class, and storages are counted, not shapes.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from logging import Logger

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import InvalidInput

# Attributes of a transformers layer or cache that hold keys and values; of a quantized layer with their scales.
CONTENT = frozenset({"keys", "values", "_quantized_keys", "_quantized_values", "key_cache", "value_cache"})
# Attributes that a kvpress press leaves on the attention modules: its per-head selection, as index tensors.
LEFT_ON_MODULES = ("masked_key_indices",)

_CONTAINERS = (list, tuple, set, frozenset, deque)
# What a cache may point to without owning it, or what holds no tensor.
_FOREIGN = (
    torch.nn.Module,
    torch.dtype,
    torch.device,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    weakref.ref,
    Logger,
    type,
    str,
    bytes,
    int,
    float,
)
# What makes an object a cache or a layer of one.
_SIGNS = ("layers", "held_parts", "keys", "get_seq_length")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Held:
    """Bytes held, by what they are for.

    Attributes
    ----------
    payload : int
        Bytes of keys and values that the cache shows.
    slack : int
        Bytes of its storages beyond what it shows: rows allocated ahead, the rest of a viewed buffer.
    metadata : int
        Everything else: positions, tables, masks, index tensors.
    """

    payload: int = 0
    slack: int = 0
    metadata: int = 0

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.payload + self.slack + self.metadata

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(getattr(self, name))}" for name in ("payload", "slack", "metadata"))
        return f"{readable(self.total)} held ({parts})"


def held_bytes(cache: object, model: torch.nn.Module | None = None) -> Held:
    """Bytes that `cache` holds, read from the storages of every tensor reachable from it.

    Attributes, lists, tuples, sets, mappings and nested objects are followed; modules, functions and weak
    references are not, as a cache does not own them. Each storage counts once, whole, on whatever device it
    lies; of views that overlap without being equal, the bytes shown are added up to at most the storage.
    A cache that was filled with gradients enabled also keeps its autograd graph alive: fill it under
    `torch.no_grad()`, the graph is not counted.

    Parameters
    ----------
    cache : transformers Cache of any class, one of its layers, or a tuple, list or mapping of caches or tensors
        Payload is what stands in `keys` and `values` (quantized: codes, scales and zero points); of a static
        layer, its filled rows. A layer that offers `held_parts()`, which yields (kind, tensor, used bytes) with
        kind "payload" or "metadata", is believed for both; its storages are still read.
    model : torch module, optional
        Also count what a kvpress press left on its modules (`masked_key_indices`), as metadata.

    Returns
    -------
    Held

    Raises
    ------
    InvalidInput
        `cache` is no cache.
    """
    plain = isinstance(cache, (*_CONTAINERS, Mapping, torch.Tensor))
    if not plain and (isinstance(cache, _FOREIGN) or not any(hasattr(cache, name) for name in _SIGNS)):
        raise InvalidInput(
            f"cache: expected a transformers cache, or a tuple, list or mapping of caches, got {type(cache).__name__}"
        )
    ledger = _Ledger()
    with torch._C.DisableTorchFunctionSubclass():  # a tensor subclass may refuse to be read; its storage is there
        ledger.walk(cache)
        for module in () if model is None else model.modules():
            for name in LEFT_ON_MODULES:
                ledger.walk(getattr(module, name, None), "metadata", top=False)
        return ledger.held()


def readable(count: int) -> str:
    """`count` bytes in the largest binary unit that leaves at least one: 1536 gives "1.5 KiB"."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


@dataclass
class _Storage:
    """One storage: its bytes, and what is shown of it. `shown` maps (kind, view) to bytes; equal views count once."""

    size: int
    shown: dict[tuple, int] = field(default_factory=dict)

    def of(self, kind: str) -> int:
        return sum(used for (of, _), used in self.shown.items() if of == kind)

    def split(self) -> Held:
        payload = min(self.of("payload"), self.size)
        metadata = min(self.of("metadata"), self.size - payload)
        return Held(payload, self.size - payload - metadata, metadata)


class _Ledger:
    """Storages met so far. Metadata is booked last: only what is neither content nor named by `held_parts`."""

    def __init__(self) -> None:
        self._storages: dict[tuple, _Storage] = {}
        self._rest: list[torch.Tensor | np.ndarray] = []

    def walk(self, root: object, kind: str = "payload", top: bool = True) -> None:
        """Book everything under `root`. Tensors in the containers at the `top` are payload, as those of a legacy
        tuple; below an object, an attribute's name decides."""
        seen: set[tuple[int, str]] = set()
        todo: list[tuple[object, str, bool]] = [(root, kind, top)]
        while todo:
            value, kind, top = todo.pop()
            if value is None or isinstance(value, _FOREIGN) or (id(value), kind) in seen:
                continue
            seen.add((id(value), kind))  # everything walked hangs on the root: no id is used twice
            if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
                self._meet(kind, value)
                todo.extend((held, "metadata", False) for held in vars(value).values())
            elif isinstance(value, np.ndarray):
                self._meet(kind, value)
            elif isinstance(value, Mapping):
                todo.extend((held, kind, top) for held in value.values())
            elif isinstance(value, _CONTAINERS):
                todo.extend((held, kind, top) for held in value)
            else:
                content = () if self._book_layer(value) else CONTENT
                inner = "metadata" if top else kind
                todo.extend((held, "payload" if name in content else inner, False) for name, held in _attributes(value))

    def held(self) -> Held:
        booked = set(self._storages)  # another view of these holds nothing more: what they do not show is slack
        for tensor in self._rest:
            if _storage(tensor)[0] not in booked:
                self._book("metadata", tensor)
        parts = [storage.split() for storage in self._storages.values()]
        return Held(*(sum(getattr(part, name) for part in parts) for name in ("payload", "slack", "metadata")))

    def _meet(self, kind: str, tensor: torch.Tensor | np.ndarray) -> None:
        if kind == "payload":
            self._book(kind, tensor)
        else:
            self._rest.append(tensor)

    def _book_layer(self, layer: object) -> bool:
        """Book what a layer says of itself: its parts, or of a static layer the filled rows. Whether it has parts."""
        if callable(parts := getattr(layer, "held_parts", None)):
            for kind, tensor, used in parts():
                self._book(kind, tensor, used)
            return True
        rows, keys = (getattr(layer, "__dict__", {}).get(name) for name in ("max_cache_len", "keys"))
        if isinstance(rows, int) and rows and isinstance(keys, torch.Tensor) and keys.dim() == 4:
            filled = min(int(layer.get_seq_length()), rows)
            for tensor in (keys, layer.values):
                self._book("payload", tensor, tensor.numel() * tensor.element_size() * filled // rows)
        return False

    def _book(self, kind: str, tensor: torch.Tensor | np.ndarray, used: int | None = None) -> None:
        key, size = _storage(tensor)
        if size:
            if isinstance(tensor, torch.Tensor):
                shown = tensor.numel() * tensor.element_size()
                view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            else:
                shown, view = tensor.nbytes, (tensor.ctypes.data, tensor.shape, tensor.strides, tensor.dtype.str)
            self._storages.setdefault(key, _Storage(size)).shown.setdefault(
                (kind, view), shown if used is None else used
            )


def _storage(tensor: torch.Tensor | np.ndarray) -> tuple[tuple, int]:
    """What identifies the memory behind `tensor`, and its size in bytes."""
    if isinstance(tensor, np.ndarray):
        while isinstance(tensor.base, np.ndarray):
            tensor = tensor.base
        return ("cpu", tensor.ctypes.data), tensor.nbytes
    if tensor.layout != torch.strided:
        raise InvalidInput(f"cache: holds a tensor of layout {tensor.layout}, expected dense tensors")
    storage = tensor.untyped_storage()
    # By address, so that memory shared with a numpy array counts once too; without one, by object.
    return (str(storage.device), storage.data_ptr() or -storage._cdata), storage.nbytes()


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """Attributes stored on an object: those of its dictionary and its slots. Properties are not run."""
    if isinstance(value, torch.Tensor):  # a subclass around other tensors, such as a quantized one
        yield from ((name, getattr(value, name)) for name in value.__tensor_flatten__()[0])
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)
