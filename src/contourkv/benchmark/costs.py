"""What a method costs when it runs as its users run it: one real pass of each press over one context.

The answers of a run come from kept sets chosen side by side after one prefill, so they say nothing of the time
and memory that a method takes alone. Here each method reads the context by itself: a kvpress press over a DynamicCache
as published, the same press through `contourkv.enforce` over a RaggedCache where its bytes are enforced, ContourKVPress
over a RaggedCache.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..devices import device_name
from ..errors import InvalidInput
from ..held import held_bytes
from ..models.loading import load_model, prepared_files, read_source
from ..press.contour import ContourKVPress
from ..press.enforced import enforce
from ..press.quiet import quiet_kvpress
from ..press.scores import attention_modules, hang_rotary, kvpress, untouched
from ..progress import Progress
from ..provenance import file_sha256, record
from ..ragged.cache import CACHE_ARGUMENTS, RaggedCache
from ..statistics.table_parts import TableParts
from .choosing import ROWS, SCORES, Chooser, ratio_of
from .methods import ENFORCED, RECTANGULAR, Method, methods_named
from .quest import QuestCache
from .reading import Reading
from .records import COSTED, write_costs
from .running import Cell, cells, check_task, said
from .samples import read_task
from .storing import tokens_read


def run_costs(
    model_folder: str | os.PathLike,
    task_path: str | os.PathLike,
    output: str | os.PathLike,
    settings: Mapping,
    *,
    device: str = "cpu",
    model_name: str | None = None,
    made_by: object = "",
) -> None:
    """Probe every query-agnostic cell on the first context of a task; write one row a cell (parquet).

    Rectangular cells are not probed: kvpress has no press that stores them.

    Parameters
    ----------
    model_folder : prepared model
    task_path : file that `write_task` wrote; its length is the probes'
    output : parquet, see `records.COSTED`
    settings : the config section `benchmark`: methods, budgets, costs.tokens
    device, model_name, made_by : as of `run_task`
    """
    folder, task = Path(model_folder), read_task(task_path)
    name = model_name or folder.name
    check_task(task, task_path, folder)
    sample = task.samples[0]
    wanted = [
        cell for cell in cells(methods_named(settings["methods"]), settings["budgets"]) if cell.storage != RECTANGULAR
    ]
    made_with = record(
        {"settings": settings["costs"], "budgets": settings["budgets"], "task": task.provenance},
        devices={"measurement": device_name(device)},
    )
    made_from = [made_with, name, file_sha256(task_path), prepared_files(folder), made_by]
    with TableParts(output, made_from, COSTED) as parts:
        named = {"-".join(map(str, (cell.method.name, cell.storage, cell.budget))): cell for cell in wanted}
        missing = [part for part in named if not parts.has(part)]
        progress = Progress(len(named), f"costs {name} at {task.length}", "cells", before=len(named) - len(missing))
        if missing:
            model = load_model(folder, device)
            ids = torch.tensor([sample.ids], device=model.device)
            probe = Probe(model, ids, sample.seed, settings["costs"]["tokens"])
            for part in progress.over(missing):
                row = {"model": name, "length": task.length, **_probed(probe, named[part])}
                parts.write(part, pd.DataFrame([row], columns=list(COSTED)))
        frame = pd.concat([parts.read(part) for part in named], ignore_index=True)
        meta = {**made_with, "model": {"name": name, "revision": read_source(folder).get("revision")}}
        write_costs(output, frame, meta)


def _probed(probe: Probe, cell: Cell) -> dict[str, object]:
    row = {
        "method": cell.method.name,
        "storage": cell.storage,
        "visibility": cell.visibility,
        "budget": cell.budget,
        "cost_status": "ok",
        "cost_message": "",
        "device": device_name(probe.model.device),
        **dict.fromkeys(
            ("probed_bytes", "left_bytes", "peak_bytes", "prefill_seconds", "compress_seconds", "tokens_per_s"),
            math.nan,
        ),
    }
    try:
        with quiet_kvpress():
            return row | probe.measure(cell)
    except Exception as error:  # its own outcome; the other methods go on
        print(f"failed: {cell.method.name}, {cell.storage}: {said(error)}", file=sys.stderr)
        return row | {"cost_status": "failed", "cost_message": said(error)}


class Probe:
    """Runs methods one after another over one context.

    Parameters
    ----------
    model : the model
    ids : int64 tensor (1, N), the context
    seed : of random draws
    tokens : decode steps that are timed
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, seed: int, tokens: int) -> None:
        self.model, self.ids, self.seed, self.tokens = model, ids, seed, tokens
        self.reading = Reading.of(model, ids)
        self.full_bytes = held_bytes(self.reading.full_cache()).payload
        self.chooser = Chooser(self.reading, self.full_bytes, seed)

    def measure(self, cell: Cell) -> dict[str, float]:
        """Bytes and seconds of one cell: the columns of `records.COSTED`."""
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._eager(cell.method.name == "h2o"), untouched(self.model):
            torch.manual_seed(self.seed)  # Random and Compactor draw from the global generator
            cache, press = self._cache_and_press(cell)
            # Right before it: what else the machine does changes from minute to minute.
            started = self._now()
            self._read(DynamicCache(config=self.model.config))
            prefill = self._now() - started
            with self._sampled(cache) as sampled:
                started = self._now()
                if press is None:
                    self._read(cache)
                else:
                    with torch.no_grad(), press(self.model):
                        hang_rotary(self.model)  # kvpress's own does not know Gemma 3's two
                        self._read(cache)
                if isinstance(cache, QuestCache):
                    cache.seal(tokens_read(cell.budget, self.ids.shape[1]))
                spent = self._now() - started - sampled["seconds"]
            left = held_bytes(cache, self.model).total
            return {
                "probed_bytes": float(self.full_bytes),
                "left_bytes": float(left),
                "peak_bytes": float(max(sampled["peak"], left)),
                "prefill_seconds": prefill,
                "compress_seconds": spent - prefill,
                "tokens_per_s": self._decode(cache),
            }

    def _cache_and_press(self, cell: Cell) -> tuple[Cache, object]:
        method, config = cell.method, self.model.config
        if method.keeps == "all":
            return DynamicCache(config=config), None
        if method.keeps == "pages":
            return QuestCache(config), None
        if method.keeps == "ragged":
            scores = "mass" if method.scores == "mass" else _press_of(method.scores)
            nominal = max(1, self.chooser.nominal_bytes(cell.budget))
            return RaggedCache(config), ContourKVPress(nominal, scores=scores, rows=ROWS, seed=self.seed)
        if cell.storage == ENFORCED:
            return RaggedCache(config), enforce(
                published_press(method, self.chooser.enforced_ratio(method, cell.budget))
            )
        return DynamicCache(), published_press(method, ratio_of(cell.budget))

    def _read(self, cache: Cache) -> None:
        with torch.no_grad():
            # The decoder alone: kvpress looks for the ids and the cache where its own pipeline gives them.
            self.model.model(input_ids=self.ids, past_key_values=cache)

    def _decode(self, cache: Cache) -> float:
        given, at = self.ids[:, -1:], self.ids.shape[1]
        with torch.no_grad():
            for step in range(self.tokens + 1):
                if step == 1:  # the first one grows buffers
                    started = self._now()
                places = torch.tensor([[at + step]], device=given.device)
                logits = self.model(given, past_key_values=cache, position_ids=places, logits_to_keep=1).logits
                given = logits[:, -1].argmax(dim=-1, keepdim=True)
        return self.tokens / (self._now() - started)

    @contextmanager
    def _sampled(self, cache: Cache) -> Iterator[dict[str, float]]:
        """Bytes of all caches in use whenever a layer has attended, before a press's own hook cuts it."""
        found = {"peak": 0.0, "seconds": 0.0}

        def sample(module: torch.nn.Module, args: tuple, kwargs: Mapping, output: object) -> None:
            started = self._now()
            used = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
            held = held_bytes([_contents(cache), _contents(used or cache)], self.model)
            found["peak"] = max(found["peak"], float(held.total))
            found["seconds"] += self._now() - started

        hooks = [module.register_forward_hook(sample, with_kwargs=True) for module in attention_modules(self.model)]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _eager(self, wanted: bool) -> Iterator[None]:
        former = self.model.config._attn_implementation
        if wanted:
            self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(former)

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def _contents(cache: Cache) -> object:
    """The cache, or what its layers name as theirs: a press that watches them has notes of its own."""
    if not all(hasattr(layer, "held_parts") for layer in cache.layers):
        return cache
    return [tensor for layer in cache.layers for _, tensor, _ in layer.held_parts()]


def published_press(method: Method, ratio: float) -> object:
    """A kvpress press that removes `ratio` as the method's publication does.

    Raises
    ------
    InvalidInput
        kvpress is not installed; the method is none of kvpress's.
    """
    library = kvpress()
    if method.scores not in SCORES:
        raise InvalidInput(f"{method.name}: kvpress has no press of it")
    if method.name == "h2o":
        return _heavy_and_recent(library)(compression_ratio=ratio)
    press = _press_of(method.scores)
    press.compression_ratio = ratio
    return library.AdaKVPress(press) if method.name.startswith("adakv_") else press


def _press_of(scores: str) -> object:
    return getattr(kvpress(), SCORES[scores])()


def _heavy_and_recent(library: object) -> type:
    from kvpress.utils import compute_n_kept

    from .choosing import with_recent

    class HeavyAndRecentPress(library.ObservedAttentionPress):
        """H2O's selection: half of the kept keys are those of largest column sum, half the last ones."""

        def score(
            self, module: torch.nn.Module, hidden: torch.Tensor, keys: torch.Tensor, *given: object
        ) -> torch.Tensor:
            scores = super().score(module, hidden, keys, *given)
            return with_recent(scores, compute_n_kept(keys.shape[2], self.compression_ratio) // 2)

    return HeavyAndRecentPress
