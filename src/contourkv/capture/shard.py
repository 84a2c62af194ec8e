"""Shards: the rows of all layers of one model on one context, in one safetensors file.

Layout (format 1)
-----------------
Tensors, little-endian, in this order; `LLL` is the layer, three digits or more:

    positions        int64    (R,)                query positions
    LLL.p            float64  (R, heads, K)       weights of keys start .. start + K - 1
    LLL.v            float32  (kv_heads, K, d)    values of the same keys
    LLL.sink         float64  (R, heads)          only where the layer has attention sinks
    checksums        uint8    (T + 1, 16)         BLAKE2b of the file's header, then of each tensor above

[start, start + K) are the keys that some row of the layer sees: with a sliding window, or where the last query
position comes before the end of the context, fewer than N. The rest of p is zero and not stored.

The safetensors metadata have one entry `contourkv`, JSON: `{"format": 1, "length": N, "layers": [{"start",
"window", "max_relative_error"}, ...], "metadata": {...}}`, the last being what the writer was given.

Reading needs numpy and safetensors, never torch, and touches one layer at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ..errors import DamagedFile, InvalidInput, said
from ..plain import NotPlain, parse_json
from ..provenance import atomic_path
from .rows import LayerRows

FORMAT = 1
CHECKSUM_BYTES = 16
# rows are held over all tokens, which a file says in a few digits; a layer that is captured takes a hundredth of it
MOST_LAYER_BYTES = 1 << 33
_DTYPES = {"float64": "F64", "float32": "F32", "int64": "I64", "uint8": "U8"}


def write_shard(path: str | os.PathLike, layers: Sequence[LayerRows], metadata: dict) -> None:
    """Write the rows of all layers of one context under `path`, whole or not at all.

    Tensors go to the file one by one, so that memory grows by one layer's rows at most.

    Parameters
    ----------
    path : ends in .safetensors
    layers : rows of layer 0, 1, ...: the same positions and the same context
    metadata : JSON-serialisable; comes back as `Shard.metadata`

    Raises
    ------
    InvalidInput
        No layer, or layers of different contexts or positions.
    ContourKVError
        The file cannot be written (no space, quota, ...): names it and the size needed. Nothing is left under
        the final name.
    """
    path = Path(path)
    _check_layers(path, layers)
    tensors = _tensors(layers)
    header = _header(layers, metadata, tensors)
    size = 8 + len(header) + sum(shape_bytes for _, _, _, shape_bytes in _layout(tensors))
    with atomic_path(path, size) as temporary, open(temporary, "wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        checksums = [_checksum(header)]
        for _, array in tensors:
            # Cropped views are made contiguous one at a time.
            data = memoryview(np.ascontiguousarray(array)).cast("B")
            checksums.append(_checksum(data))
            handle.write(data)
        handle.write(b"".join(checksums))
        handle.flush()
        # Some file systems report a full disk only here, and the rename must not come first.
        os.fsync(handle.fileno())


class Shard:
    """A shard on disk, read a layer at a time.

    Parameters
    ----------
    path : str or path

    Attributes
    ----------
    path : Path
    metadata : dict, as given to `write_shard`
    layers : int
    positions : (R,) int64 query positions
    length : N, tokens of the context

    Raises
    ------
    InvalidInput
        Here or when a layer is read: no such file, not a shard, truncated, or a bit has changed since it was
        written. Names the file and what to do.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        header = self._raw_header()
        self._checksums, description = self._open(header)
        self._header_checksum = _checksum(header)
        self.metadata: dict = description["metadata"]
        self.length: int = description["length"]
        self._layers: list[dict] = description["layers"]
        (self.positions,) = self._read(["positions"])
        if self.positions.ndim != 1 or self.positions.dtype != np.int64:
            raise self._damaged("its positions are no list of whole numbers")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def __len__(self) -> int:
        return self.layers

    def __iter__(self) -> Iterator[LayerRows]:
        return (self.layer(index) for index in range(self.layers))

    def layer(self, index: int) -> LayerRows:
        """Rows of layer `index`, checked against the checksums.

        p and v are over all N keys again: zero where the shard holds none.
        """
        if not 0 <= index < self.layers:
            raise InvalidInput(f"{self.path}: layer {index} asked for, the shard has layers 0..{self.layers - 1}")
        about = self._layers[index]
        start, window = about["start"], about["window"]
        names = [f"{index:03d}.p", f"{index:03d}.v"]
        if f"{index:03d}.sink" in self._checksums:
            names.append(f"{index:03d}.sink")
        p, v, *sink = self._read(names)
        first = np.zeros_like(self.positions) if window is None else np.maximum(self.positions - window + 1, 0)
        if p.ndim != 3 or v.ndim != 3 or p.shape[2] != v.shape[1] or start + p.shape[2] > self.length:
            raise self._damaged(f"the keys of layer {index} do not lie in its {self.length} tokens")
        if (p.nbytes + v.nbytes) // max(p.shape[2], 1) * self.length > MOST_LAYER_BYTES:
            raise self._damaged(f"layer {index} over {self.length} tokens takes more than {MOST_LAYER_BYTES} bytes")
        try:
            return LayerRows(
                layer=index,
                p=_spread(p, start, self.length, axis=2),
                v=_spread(v, start, self.length, axis=1),
                positions=self.positions,
                first_visible=first,
                window=window,
                max_relative_error=about["max_relative_error"],
                sink=sink[0] if sink else None,
            )
        except InvalidInput as error:
            raise self._damaged(str(error)) from error

    @property
    def digest(self) -> str:
        """Hexadecimal digest of all that the shard holds, from its checksums: nothing is read for it."""
        return _checksum(b"".join(self._checksums.values()) + self._header_checksum).hex()

    def verify(self) -> None:
        """Read everything once; raises InvalidInput if anything is not as it was written."""
        for _ in self:
            pass

    def __repr__(self) -> str:
        return f"Shard({str(self.path)!r}, layers={self.layers}, positions={self.positions.tolist()})"

    def _raw_header(self) -> bytes:
        try:
            with open(self.path, "rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                if size > os.fstat(handle.fileno()).st_size:
                    raise self._damaged("it does not begin as a safetensors file does")
                return handle.read(size)
        except FileNotFoundError as error:
            raise InvalidInput(f"{self.path}: no such shard; run the capture that makes it") from error
        except OSError as error:
            raise InvalidInput(f"{self.path}: the shard cannot be read ({error.strerror or error})") from error

    def _open(self, header: bytes) -> tuple[dict[str, bytes], dict]:
        try:
            with safe_open(self.path, framework="numpy") as file:
                text = (file.metadata() or {}).get("contourkv")
                if text is None:
                    raise self._damaged("it is a safetensors file but no shard")
                sums = file.get_tensor("checksums").tobytes()
        except InvalidInput:
            raise
        except Exception as error:  # safetensors raises all kinds over a type that numpy has not
            raise self._damaged(said(error)) from error
        found = [sums[at : at + CHECKSUM_BYTES] for at in range(0, len(sums), CHECKSUM_BYTES)]
        if found[:1] != [_checksum(header)]:
            raise self._damaged("its header is not what was written")
        try:
            description = parse_json(text)
            # The header is as it was written, so its order is the checksums' order.
            names = [name for name in parse_json(header) if name not in ("__metadata__", "checksums")]
        except NotPlain as error:
            raise self._damaged(str(error)) from error
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            raise self._damaged(f"it does not say that its format is {FORMAT}, which this version reads")
        if wrong := _not_described(description):
            raise self._damaged(wrong)
        if len(names) != len(found) - 1 or not _names(len(description["layers"])) <= set(names):
            raise self._damaged("its tensors are not those of its layers")
        return dict(zip(names, found[1:], strict=True)), description

    def _read(self, names: list[str]) -> list[np.ndarray]:
        try:
            with safe_open(self.path, framework="numpy") as file:
                arrays = [file.get_tensor(name) for name in names]
        except Exception as error:  # safetensors raises all kinds over a type that numpy has not
            raise self._damaged(said(error)) from error
        for name, array in zip(names, arrays, strict=True):
            if array.size == 0 or _checksum(memoryview(array).cast("B")) != self._checksums[name]:
                raise self._damaged(f"tensor {name} is not what was written")
        return arrays

    def _damaged(self, why: str) -> InvalidInput:
        return DamagedFile(self.path, f"not a whole shard ({why})")


def _not_described(description: dict) -> str:
    """What is wrong with the description of a shard; empty where nothing is."""

    def whole(value: object, least: int) -> bool:
        return type(value) is int and value >= least

    layers, length = description.get("layers"), description.get("length")
    if not whole(length, 1) or not isinstance(description.get("metadata"), dict):
        return "its length is no number of tokens, or its metadata are no mapping"
    if not isinstance(layers, list) or not layers:
        return "it names no layers"
    for index, about in enumerate(layers):
        sound = (
            isinstance(about, dict) and whole(about.get("start"), 0) and type(about.get("max_relative_error")) is float
        )
        if not sound or not (about.get("window", 0) is None or whole(about.get("window"), 1)):
            return f"start, window or max_relative_error of layer {index} are none"
    return ""


def _names(layers: int) -> set[str]:
    """Tensors that a shard of so many layers must have."""
    return {"positions", *(f"{index:03d}.{part}" for index in range(layers) for part in "pv")}


def _check_layers(path: Path, layers: Sequence[LayerRows]) -> None:
    if not layers:
        raise InvalidInput(f"{path}: a shard needs the rows of at least one layer")
    first = layers[0]
    for index, rows in enumerate(layers):
        if rows.layer != index:
            raise InvalidInput(f"{path}: expected the rows of layer {index}, got layer {rows.layer}")
        if rows.length != first.length or not np.array_equal(rows.positions, first.positions):
            raise InvalidInput(f"{path}: layers 0 and {index} are of different contexts or query positions")


def _tensors(layers: Sequence[LayerRows]) -> list[tuple[str, np.ndarray]]:
    tensors = [("positions", layers[0].positions)]
    for rows in layers:
        keys = _seen(rows)
        tensors += [(f"{rows.layer:03d}.p", rows.p[:, :, keys]), (f"{rows.layer:03d}.v", rows.v[:, keys])]
        if rows.sink is not None:
            tensors.append((f"{rows.layer:03d}.sink", rows.sink))
    return tensors


def _seen(rows: LayerRows) -> slice:
    return slice(int(rows.first_visible.min()), int(rows.positions.max()) + 1)


def _layout(tensors: list[tuple[str, np.ndarray]]) -> Iterator[tuple[str, str, list[int], int]]:
    for name, array in tensors:
        yield name, _DTYPES[array.dtype.name], list(array.shape), array.nbytes
    yield "checksums", "U8", [len(tensors) + 1, CHECKSUM_BYTES], (len(tensors) + 1) * CHECKSUM_BYTES


def _header(layers: Sequence[LayerRows], metadata: dict, tensors: list[tuple[str, np.ndarray]]) -> bytes:
    description = {
        "format": FORMAT,
        "length": layers[0].length,
        "layers": [
            {
                "start": _seen(rows).start,
                "window": rows.window,
                "max_relative_error": rows.max_relative_error,
            }
            for rows in layers
        ],
        "metadata": metadata,
    }
    entries: dict[str, object] = {
        "__metadata__": {"contourkv": json.dumps(description, sort_keys=True, ensure_ascii=False)}
    }
    offset = 0
    for name, dtype, shape, nbytes in _layout(tensors):
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # safetensors aligns the data to 8 bytes by spaces after the header.
    return text + b" " * (-len(text) % 8)


def _spread(array: np.ndarray, start: int, length: int, axis: int) -> np.ndarray:
    if array.shape[axis] == length:
        return array
    shape = list(array.shape)
    shape[axis] = length
    whole = np.zeros(shape, array.dtype)
    at = [slice(None)] * array.ndim
    at[axis] = slice(start, start + array.shape[axis])
    whole[tuple(at)] = array
    return whole


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()
