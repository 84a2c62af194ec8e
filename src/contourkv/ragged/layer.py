"""One layer of a ragged cache: what it holds, how keys get in, and how they are given back.

Two parts. The *frozen* part is what a compression left: per layer flat `keys` (T, d) and `values` (T, dv), one run of
consecutive entries per (sequence, KV head), runs of any length, no slack. The *tail* is what was appended since:
every head gets every new token, so it is a rectangle (B, H, capacity, d) whose slots are written, and dropping it is
a change of one number. Attention reads both and joins them by their log-sum-exp.

Positions are places in the sequence as the model was fed it, padding included; they never change when entries around
them are evicted, so rotary embeddings of later tokens continue from the true length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..errors import InvalidInput
from ..operator import whole_number
from .attention import attend, takes_triton
from .registry import RaggedKey, attach

if TYPE_CHECKING:
    from .cache import Watcher
    from .steps import Clock

_NO_INDEX = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TAIL_STEP = 16  # slots that a full tail grows by, at least; else by an eighth of it
SLIDING_STEP = 64  # tokens, at least, that a sliding layer lets go of at once; else a quarter of its window
SLIDING_SLACK = 64  # tokens behind its window that a sliding layer still has, so that a few can be cropped
# transformers 5.2 gives `crop` the length to keep, newer ones the tokens to remove as a negative count.
CROP_TAKES_LENGTH = "max_length" in inspect.signature(DynamicLayer.crop).parameters


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, with as many entries in each KV head as were kept there.

    Parameters
    ----------
    index : int
        Number of the layer, for errors.
    window : int, optional
        Keys that a row of a sliding layer can see, its own included. Such a layer holds what the next token can
        still see, the last window - 1 tokens; compression chooses among those. Of what is appended it lets go in
        steps, so that up to a quarter more, at least 128, are held for a while. None where a row sees all earlier
        keys.
    model_type : str, optional
        Architecture and number of layers of the model that the cache was made for; another model is refused.
    layers : int, optional

    Attributes
    ----------
    length : int
        Tokens seen, kept or not.
    frozen_keys, frozen_values : tensor (T, d), (T, dv)
        Entries of the frozen part; None before the first token.
    positions : int32 tensor (T,)
        Position of each of them, ascending inside a run.
    begin, end : int64 tensor (B, H), on the CPU
        Run of each sequence and KV head; sequences that share a context share its runs.
    tail_keys, tail_values : tensor (B, H, capacity, d), (B, H, capacity, dv)
        Appended entries: slots 0 .. tail_length, of the positions from tail_first on.
    tail_visible : bool tensor (B, capacity), optional
        False where an appended token is padding.
    clock : Clock, optional
        While `Steps` feeds the model: where new tokens go and how long the tail is, counted on the device.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self, index: int, window: int | None = None, model_type: str | None = None, layers: int | None = None
    ) -> None:
        self.index, self.window, self.model_type, self.layers = index, window, model_type, layers
        self.watcher: Watcher | None = None
        self.clock: Clock | None = None
        self._empty()

    def _empty(self) -> None:
        self.is_initialized = False
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.length = 0
        self.frozen_keys = self.frozen_values = self.positions = self.begin = self.end = None
        self._copied_runs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._drop_tail(0)
        self._mark: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._first_block = False

    def _refuse_under_steps(self, what: str) -> None:
        if self.clock is not None:
            raise InvalidInput(f"{what}: Steps feeds the model from this cache and knows its buffers; close it first")

    def _drop_tail(self, first: int) -> None:
        self.tail_keys = self.tail_values = self.tail_visible = None
        self.tail_length, self.tail_first, self._tail_trimmed = 0, first, False

    def __repr__(self) -> str:
        held = "empty" if not self.length else f"{int(self.lengths().sum())} entries of {self.length} tokens"
        return f"RaggedLayer({self.index}, {held}" + (f", window {self.window})" if self.window else ")")

    def copy(self) -> RaggedLayer:
        """Another layer with the same contents: the frozen part is shared, for it is replaced and never written."""
        twin = copy.copy(self)
        twin.clock = None
        for name in ("tail_keys", "tail_values", "tail_visible"):
            tail = getattr(self, name)
            setattr(twin, name, None if tail is None else tail.clone())
        return twin

    # ------------------------------------------------------------------ what transformers asks

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    @property
    def keys(self) -> torch.Tensor:
        raise AttributeError(
            "a ragged layer has no rectangular keys or values; to run a kvpress press over a RaggedCache wrap it: "
            "contourkv.enforce(press)"
        )

    values = keys

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype and device from the first keys; raise InvalidInput for a dtype that is not a plain float."""
        if key_states.dtype not in DTYPES or value_states.dtype != key_states.dtype:
            raise InvalidInput(
                f"RaggedCache, layer {self.index}: got keys of {key_states.dtype} and values of {value_states.dtype}, "
                "expected both in float32, bfloat16, float16 or float64; quantized caches are not supported"
            )
        attach()  # here, and not once at import: functions may be registered at any time
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys (B, H, Q, d) and values (B, H, Q, dv); return what attention needs to find this layer."""
        key, value = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        if self.length == 0:
            self._first(key, value)
        else:
            self._append(key, value)
        return RaggedKey.of(key_states, self), value_states

    def get_mask_sizes(self, query: torch.Tensor | int) -> tuple[int, int]:
        """(keys, offset) of the mask that the model makes: the new keys alone, for what is held has a mask here."""
        return (query if isinstance(query, int) else query.shape[0]), self.length

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """Nothing to do: a few tokens can always be cropped."""

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self._refuse_under_steps("reset")
        self._empty()

    def offload(self) -> None:
        raise InvalidInput("RaggedCache: offloading is not supported; a layer stays on its own device")

    prefetch = offload

    # ------------------------------------------------------------------ getting in

    def _first(self, key: torch.Tensor, value: torch.Tensor) -> None:
        sequences, heads, tokens, _ = key.shape
        if tokens == 0:
            return
        self.frozen_keys, self.frozen_values = _own(key).flatten(0, 2), _own(value).flatten(0, 2)
        self.positions = torch.arange(tokens, dtype=torch.int32, device=self.device).repeat(sequences * heads)
        self.end = torch.arange(1, sequences * heads + 1).view(sequences, heads) * tokens
        self.begin = self.end - tokens
        self.length = tokens
        self._drop_tail(tokens)
        self._first_block = True

    def _append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        tokens = key.shape[2]
        self._first_block = False
        self._check_like(key, value)
        if self.clock is not None:
            self._append_by_clock(key, value)
            return
        self._make_room(tokens)
        first, last = self.tail_length, self.tail_length + tokens
        self.tail_keys[:, :, first:last] = key
        self.tail_values[:, :, first:last] = value
        if self.tail_visible is not None:
            self.tail_visible[:, first:last] = True
        self.counted(tokens)

    def reserve(self, tokens: int) -> None:
        """Make room in the tail for `tokens` more, so that its buffers stay where they are while these come."""
        self._check_filled("reserve")
        self._refuse_under_steps("reserve")
        self._make_room(tokens)

    def _append_by_clock(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write where the clock says; `Steps` counts here once the step is done."""
        self.tail_keys.index_copy_(2, self.clock.slots, key)
        self.tail_values.index_copy_(2, self.clock.slots, value)
        if self.tail_visible is not None:
            self.tail_visible.index_fill_(1, self.clock.slots, True)

    def counted(self, tokens: int) -> None:
        """Take note that so many stand in the tail now; `Steps` does when its step is done."""
        self.tail_length, self.length = self.tail_length + tokens, self.length + tokens

    def _check_like(self, key: torch.Tensor, value: torch.Tensor) -> None:
        sequences, heads = self.begin.shape
        if key.shape[0] != sequences:
            raise InvalidInput(
                f"RaggedCache: it holds {sequences} sequence(s), the model was given {key.shape[0]}; reset() it for "
                "another batch, or batch_repeat_interleave() it for several continuations of each"
            )
        if key.shape[1] != heads or key.shape[-1] != self.frozen_keys.shape[-1]:
            raise InvalidInput(
                f"RaggedCache, layer {self.index}: it holds {heads} KV heads of {self.frozen_keys.shape[-1]}, got "
                f"{key.shape[1]} of {key.shape[-1]}; was it filled by another model?"
            )
        if key.dtype != self.dtype or key.device != self.device:
            raise InvalidInput(
                f"RaggedCache, layer {self.index}: it holds {self.dtype} on {self.device}, got {key.dtype} on "
                f"{key.device}; reset() it after the model was moved or converted"
            )

    def _make_room(self, tokens: int) -> None:
        if self.tail_keys is None or self.tail_length + tokens > self.tail_keys.shape[2]:
            self._grow(tokens)

    def _grow(self, tokens: int) -> None:
        """Make room for `tokens` more slots: in steps, so that copying stays a few rows per appended token."""
        sequences, heads = self.begin.shape
        used, dropped = self.tail_length, 0
        if self.window is not None:
            kept = self.window - 1 + SLIDING_SLACK
            if used >= kept + max(SLIDING_STEP, self.window // 4):
                used, dropped = kept, used - kept
                self.tail_length, self.tail_first, self._tail_trimmed = used, self.tail_first + dropped, True
                if self._mark is None:  # otherwise rollback wants it
                    self._drop_frozen()
        capacity = used + tokens
        # A question or a chunk fed at once gets just its room; token by token, steps.
        if tokens < TAIL_STEP:
            capacity += max(TAIL_STEP, capacity // 8) - tokens
        kept = slice(dropped, dropped + used)

        def grown(old: torch.Tensor | None, dim: int) -> torch.Tensor:
            new = torch.empty(sequences, heads, capacity, dim, dtype=self.dtype, device=self.device)
            if used:
                new[:, :, :used] = old[:, :, kept]
            return new

        self.tail_keys = grown(self.tail_keys, self.frozen_keys.shape[-1])
        self.tail_values = grown(self.tail_values, self.frozen_values.shape[-1])
        if self.tail_visible is not None:
            visible = torch.ones(sequences, capacity, dtype=torch.bool, device=self.device)
            visible[:, :used] = self.tail_visible[:, kept]
            self.tail_visible = visible

    def _drop_frozen(self) -> None:
        self.frozen_keys, self.frozen_values = (
            part.new_empty(0, part.shape[1]) for part in (self.frozen_keys, self.frozen_values)
        )
        self.positions = self.positions.new_empty(0)
        self.begin = self.end = torch.zeros_like(self.begin)

    def take(self, keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor, length: int) -> None:
        """Fill the empty layer with the entries of `keys` (B, H, N, d) and `values` that `keep` (B, H, N) names.

        Key n has position length - N + n. Only what is kept is copied. `keep` may name B kept sets of one sequence
        (1, H, N, d): then the layer holds B sequences that differ in what they keep of it.
        """
        if self.length:
            raise InvalidInput(f"RaggedCache, layer {self.index}: it holds {self.length} tokens; reset() it first")
        contexts = 1 if keys.shape[0] == 1 else keep.shape[0]
        shape = keys.shape[:3]
        if shape != (contexts, *keep.shape[1:]) or shape != values.shape[:3] or length < shape[2]:
            raise InvalidInput(
                f"take: keys {tuple(keys.shape)}, values {tuple(values.shape)}, keep {tuple(keep.shape)} and length "
                f"{length} do not belong together; expected (B or 1, H, N, d), (B or 1, H, N, dv), (B, H, N) and at "
                "least N"
            )
        self.lazy_initialization(keys, values)
        sequences, heads, tokens = keep.shape
        source = keep.to(self.device).reshape(-1).nonzero().squeeze(1)
        self.positions = (source % tokens + (length - tokens)).to(torch.int32)
        if keys.shape[0] == 1:
            source = source % (heads * tokens)
        self.frozen_keys = keys.reshape(-1, keys.shape[-1]).index_select(0, source)
        self.frozen_values = values.reshape(-1, values.shape[-1]).index_select(0, source)
        counts = keep.sum(dim=2).cpu()
        self.end = counts.view(-1).cumsum(0).view(sequences, heads)
        self.begin = self.end - counts
        self.length = length
        self._drop_tail(length)

    def restore(self, parts: Mapping[str, torch.Tensor], facts: Mapping[str, int | None], device: torch.device) -> None:
        """Fill the empty layer with what `RaggedCache.save` wrote of one; raise InvalidInput if that cannot be.

        Nothing in it is believed: attention reads these runs without looking again.
        """
        keys, values, positions, end = (parts[name] for name in ("keys", "values", "positions", "end"))
        length, first, marked = facts["length"], facts["tail_first"], facts["marked"]
        sequences, heads = end.shape
        counts = torch.diff(end.view(-1), prepend=end.new_zeros(1))
        tail_keys, tail_values = parts.get("tail_keys"), parts.get("tail_values")
        used = 0 if tail_keys is None else tail_keys.shape[2]
        entries = len(keys)
        sound = (
            end.dtype == torch.int64
            and positions.dtype == torch.int32
            and keys.dim() == values.dim() == 2
            and (len(values), len(positions), int(end[-1, -1])) == (entries, entries, entries)
            and bool((counts >= 0).all())
            and 0 < first <= length
            and length == first + used
            and marked in (None, first)
        )
        if sound and entries:
            run = torch.repeat_interleave(torch.arange(len(counts)), counts)
            ascending = (positions[1:] > positions[:-1]) | (run[1:] != run[:-1])
            sound = bool(ascending.all()) and 0 <= int(positions.min()) and int(positions.max()) < first
        if sound and used:
            sound = (tail_keys.shape, tail_values.shape) == (
                (sequences, heads, used, keys.shape[1]),
                (sequences, heads, used, values.shape[1]),
            ) and {tail_keys.dtype, tail_values.dtype} == {keys.dtype}
        if sound and "tail_visible" in parts:
            visible = parts["tail_visible"]
            sound = visible.dtype == torch.bool and tuple(visible.shape) == (sequences, used)
        if not sound:
            raise InvalidInput(f"a saved RaggedCache: layer {self.index} is damaged; save it again")
        self.lazy_initialization(keys, values)
        self.device = device
        self.frozen_keys, self.frozen_values, self.positions = (part.to(device) for part in (keys, values, positions))
        self.end = end
        self.begin = end - counts.view(sequences, heads)
        self._drop_tail(first)
        self.length = length
        if used:
            self.tail_keys, self.tail_values, self.tail_length = tail_keys.to(device), tail_values.to(device), used
            if "tail_visible" in parts:
                self.tail_visible = parts["tail_visible"].to(device)
        if marked is not None:
            self._mark = (marked, self.begin, self.end)

    # ------------------------------------------------------------------ attention

    def attention(
        self,
        own: Callable,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        args: tuple,
        kwargs: dict,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of new queries (B, heads, Q, d) over everything held, their own keys included.

        The first block attends by the model's own function `own`, under the mask that the model made. Later ones
        attend here, and of the mask only which of the new tokens are padding is used.
        """
        if module.training and (kwargs.get("dropout") or torch.is_grad_enabled()):
            raise InvalidInput("RaggedCache: the model is in training mode; call model.eval() first")
        config = getattr(module, "config", None)
        if self.model_type is not None and config is not None:
            refuse_other_model("RaggedCache", self.model_type, self.layers, config)
        tokens = key.shape[2]
        visible = _visible(mask, tokens, look=self._first_block or self.device.type == "cpu")
        if self._first_block:
            output, weights = own(module, query, key, value, mask, *args, **kwargs)
            if self.watcher is not None:
                with torch.no_grad():
                    self.watcher.first_block(self, module, query, key, value, weights, visible, kwargs)
            self._settle(visible)
            return output, weights
        if visible is not None and self.clock is None:  # under a clock no token is padding
            if self.tail_visible is None:
                shape = self.tail_keys.shape
                self.tail_visible = torch.ones(shape[0], shape[2], dtype=torch.bool, device=self.device)
            self.tail_visible[:, self.tail_length - tokens : self.tail_length] = visible
        with torch.no_grad():
            output = self.attend(query, **self.how(query, kwargs))
            if self.watcher is not None:
                self.watcher.later_block(self, module, query, visible, kwargs)
        return output.transpose(1, 2).contiguous(), None

    def how(self, query: torch.Tensor, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Scaling, window, soft cap and sinks of this layer's rows, from what the model hands to its attention."""
        scaling = kwargs.get("scaling")
        return {
            "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
            "window": self.window,
            "softcap": kwargs.get("softcap"),
            "sinks": kwargs.get("s_aux"),
        }

    def attend(self, query: torch.Tensor, **how: object) -> torch.Tensor:
        """`contourkv.ragged.attend` of the newest rows over all that the layer holds; `how` as it says."""
        how.setdefault("tail_visible", self.tail_visible)
        return attend(
            query,
            self.frozen_keys,
            self.frozen_values,
            self.positions,
            *self._runs(),
            self.tail_keys,
            self.tail_values,
            self.tail_length if self.clock is None else self.clock.length,
            self.tail_first,
            **how,
        )

    def _runs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`begin` and `end` where attention reads them: for the Triton way on the GPU, copied when they change."""
        if not takes_triton(self.device):
            return self.begin, self.end
        if self._copied_runs is None or self._copied_runs[0] is not self.begin:
            self._copied_runs = self.begin, self.begin.to(self.device), self.end.to(self.device)
        return self._copied_runs[1:]

    def _settle(self, visible: torch.Tensor | None) -> None:
        """After the first block: drop padding, and what a sliding layer's next token cannot see."""
        self._first_block = False
        out_of_window = self.window is not None and self.length > self.window - 1
        if visible is None and not out_of_window:
            return
        keep = torch.ones(self.begin.shape[0], self.length, dtype=torch.bool, device=self.device)
        if visible is not None:
            keep &= visible
        if out_of_window:
            keep[:, : self.length - self.window + 1] = False
        self.evict(keep.unsqueeze(1).expand(*self.begin.shape, self.length))

    # ------------------------------------------------------------------ giving back

    def lengths(self) -> torch.Tensor:
        """Entries held in each sequence and KV head, int64 (B, H), the tail's padding included."""
        self._check_filled("lengths")
        return self.end - self.begin + self.tail_length

    def _check_filled(self, what: str) -> None:
        if not self.length:
            raise InvalidInput(f"{what}: layer {self.index} of the cache is empty; feed it a context first")

    def evict(self, keep: torch.Tensor) -> None:
        """Keep the entries whose position `keep` names, bool (B, H, length); free all others, and the tail's slack.

        Builds the new frozen part, keys first, and drops the old one: beside what the layer held, at most its new
        keys or values and 16 bytes an entry are needed on the way.
        """
        self._check_filled("evict")
        self._refuse_under_steps("evict")
        sequences, heads = self.begin.shape
        if not isinstance(keep, torch.Tensor):
            raise InvalidInput(f"evict: keep: expected a bool tensor, got {type(keep).__name__}")
        if keep.dtype != torch.bool or tuple(keep.shape) != (sequences, heads, self.length):
            raise InvalidInput(
                f"evict: keep is {keep.dtype} {tuple(keep.shape)}, expected bool {(sequences, heads, self.length)}: "
                "sequences, KV heads, tokens seen"
            )
        keep = keep.to(self.device)
        runs = sequences * heads
        source, run = self._entries()
        chosen = keep.reshape(runs, self.length)[run, self.positions[source].long()]
        source, run = source[chosen], run[chosen]
        counts = torch.bincount(run, minlength=runs)
        used, first = self.tail_length, self.tail_first
        if used:
            in_tail = keep[:, :, first : first + used].clone()
            if self.tail_visible is not None:
                in_tail &= self.tail_visible[:, None, :used]
            appended = in_tail.reshape(runs, used).sum(dim=1)
            slot = in_tail.reshape(-1).nonzero().squeeze(1)
            # Where each chosen entry goes: after all of earlier runs; a run's tail behind its frozen entries.
            into_frozen = torch.arange(len(source), device=self.device) + (appended.cumsum(0) - appended)[run]
            into_tail = torch.arange(len(slot), device=self.device) + counts.cumsum(0)[slot // used]
            counts = counts + appended

        def compacted(old: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor:
            if not used:
                return old.index_select(0, source)
            new = torch.empty(len(source) + len(slot), *old.shape[1:], dtype=old.dtype, device=old.device)
            new[into_frozen] = old[source]
            new[into_tail] = tail[:, :, :used].reshape(runs * used, *old.shape[1:])[slot]
            return new

        tail_positions = torch.arange(first, first + used, dtype=torch.int32, device=self.device)
        self.positions = compacted(self.positions, tail_positions.expand(sequences, heads, used) if used else None)
        self.frozen_keys = compacted(self.frozen_keys, self.tail_keys)
        self.tail_keys = None
        self.frozen_values = compacted(self.frozen_values, self.tail_values)
        counts = counts.cpu()
        self.end = counts.cumsum(0).view(sequences, heads)
        self.begin = self.end - counts.view(sequences, heads)
        self._drop_tail(self.length)
        self._mark = None

    def _entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row in the frozen part and run (sequence * H + head) of every frozen entry, int64, in the order of runs."""
        begin, counts = self.begin.view(-1), (self.end - self.begin).view(-1)
        run = torch.repeat_interleave(torch.arange(len(counts)), counts)
        source = torch.arange(len(run)) + (begin - counts.cumsum(0) + counts)[run]
        return source.to(self.device), run.to(self.device)

    def mark(self) -> None:
        """Make this the state that `rollback` returns to; what was appended joins the frozen part."""
        self._refuse_under_steps("mark")
        if self.tail_length:
            keep = torch.ones(*self.begin.shape, self.length, dtype=torch.bool, device=self.device)
            if self.window is not None:
                keep[:, :, : max(self.length - self.window + 1, 0)] = False
            self.evict(keep)
        self._mark = (self.length, self.begin, self.end)

    @property
    def marked_length(self) -> int | None:
        """Tokens seen at the mark; None without one."""
        return None if self._mark is None else self._mark[0]

    def rollback(self) -> None:
        """Return to the mark: the tail is dropped, and the memory that it took."""
        self._refuse_under_steps("rollback")
        self.length, self.begin, self.end = self._mark
        self._drop_tail(self.length)

    def crop(self, count: int) -> None:
        """What the installed transformers means by `crop`: see RaggedCache.crop."""
        if self.is_initialized:
            self.crop_to(cropped_length(count, self.length))

    def crop_to(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        if length >= self.length:
            return
        self._refuse_under_steps("crop")
        first_needed = 0 if self.window is None else length - self.window + 1
        lost = self._lost_before()
        if first_needed < lost:
            raise InvalidInput(
                f"crop: layer {self.index} has a sliding window of {self.window} and lets go of what lies behind it; "
                f"at {length} tokens it needs positions from {max(first_needed, 0)} on and holds them from {lost} on"
            )
        if length >= self.tail_first:
            self.tail_length = length - self.tail_first
        else:
            keep = torch.zeros(*self.begin.shape, self.length, dtype=torch.bool, device=self.device)
            keep[:, :, :length] = True
            self.evict(keep)
            self._drop_tail(length)
        self.length = length

    def _lost_before(self) -> int:
        """Position before which a sliding layer has let go of keys for good; 0 if it has all."""
        if self.window is None:
            return 0
        if self._tail_trimmed:
            return self.tail_first
        return max(self.tail_first - self.window + 1, 0)

    # ------------------------------------------------------------------ batches

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence b becomes what sequence beam_idx[b] was; the frozen part is shared, only the tail is copied."""
        if self.length == 0:
            return
        self._refuse_under_steps("reorder_cache")
        sequences = self.begin.shape[0]
        if not isinstance(beam_idx, torch.Tensor) or beam_idx.dim() != 1 or beam_idx.dtype in _NO_INDEX:
            raise InvalidInput("reorder_cache: expected a vector of whole numbers, one a sequence")
        at = beam_idx.to("cpu", torch.int64)
        if at.numel() == 0 or at.min() < 0 or at.max() >= sequences:
            raise InvalidInput(
                f"reorder_cache: expected one or more of the sequences 0..{sequences - 1}, got {at.tolist()}"
            )
        self.begin, self.end = self.begin.index_select(0, at), self.end.index_select(0, at)
        if self.tail_keys is not None:
            at = at.to(self.device)
            self.tail_keys = self.tail_keys.index_select(0, at)
            self.tail_values = self.tail_values.index_select(0, at)
            if self.tail_visible is not None:
                self.tail_visible = self.tail_visible.index_select(0, at)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, one after another; the frozen part is held once."""
        repeats = whole_number("batch_repeat_interleave: repeats", repeats, 1)
        if self.length:
            self.reorder_cache(torch.arange(self.begin.shape[0]).repeat_interleave(repeats))

    # ------------------------------------------------------------------ what is held

    def rectangle(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything held as rectangles over the positions that some head holds, for code that wants them: a copy.

        Returns positions int64 (n,), keys (B, H, n, d), values (B, H, n, dv), zero where a head has no entry, and
        which it has, bool (B, H, n).
        """
        sequences, heads = self.begin.shape
        source, run = self._entries()
        frozen, place = self.positions[source].long().unique(return_inverse=True)
        used, runs = self.tail_length, sequences * heads
        count = len(frozen) + used
        tail = torch.arange(self.tail_first, self.tail_first + used, device=self.device)

        def spread(flat: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor:
            full = torch.zeros(runs, count, *flat.shape[1:], dtype=flat.dtype, device=self.device)
            full[run, place] = flat[source]
            if used:
                full[:, count - used :] = tail[:, :, :used].reshape(runs, used, *flat.shape[1:])
            return full.view(sequences, heads, count, *flat.shape[1:])

        held = torch.zeros(runs, count, dtype=torch.bool, device=self.device)
        held[run, place] = True
        held[:, count - used :] = True
        held = held.view(sequences, heads, count)
        if used and self.tail_visible is not None:
            held[:, :, count - used :] &= self.tail_visible[:, None, :used]
        keys, values = spread(self.frozen_keys, self.tail_keys), spread(self.frozen_values, self.tail_values)
        return torch.cat([frozen, tail]), keys, values, held

    def held_parts(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(kind, tensor, bytes in use) of everything that the layer owns; the rest of a storage is slack."""
        for kind, tensor in (
            ("payload", self.frozen_keys),
            ("payload", self.frozen_values),
            ("metadata", self.positions),
            ("metadata", self.begin),
            ("metadata", self.end),
            *(("metadata", copied) for copied in (self._copied_runs or ())[1:]),
            *(("metadata", number) for number in self.clock or ()),
        ):
            if tensor is not None:
                yield kind, tensor, tensor.numel() * tensor.element_size()
        for kind, tensor in (
            ("payload", self.tail_keys),
            ("payload", self.tail_values),
            ("metadata", self.tail_visible),
        ):
            if tensor is not None:
                per_slot = tensor.numel() // tensor.shape[2 if kind == "payload" else 1] * tensor.element_size()
                yield kind, tensor, per_slot * self.tail_length


def refuse_other_model(cache: str, model_type: str, layers: int, config: object) -> None:
    """Raise InvalidInput unless the model of `config` is of the architecture and layers that a cache was made for."""
    found = getattr(config, "num_hidden_layers", layers)
    if (config.model_type, found) != (model_type, layers):
        raise InvalidInput(
            f"{cache}: it was made for a {model_type} of {layers} layers, the model is a {config.model_type} of "
            f"{found}; make one from this model's config"
        )


def cropped_length(count: int, length: int) -> int:
    """Tokens left after transformers' `crop(count)` of `length` tokens, in the meaning of the installed version."""
    count = whole_number("crop", count)
    if count < 0 or (count == 0 and not CROP_TAKES_LENGTH):
        left = length + count
    elif CROP_TAKES_LENGTH:
        left = min(count, length)
    else:
        raise InvalidInput(f"crop: got {count}; this transformers removes tokens by a negative count, crop(-{count})")
    if left < 0:
        raise InvalidInput(f"crop: cannot remove {-count} tokens of {length}")
    return left


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, contiguous, in a storage of its own: a view would keep all of what the model made."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _visible(mask: torch.Tensor | None, tokens: int, look: bool) -> torch.Tensor | None:
    """Which of the new tokens are not padding, bool (B, tokens), from the model's mask; None if there is no mask.

    A token is real iff it may see itself. With `look` also None if all are real: on a GPU to know that is to wait.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < tokens:
        raise InvalidInput(
            "RaggedCache: the attention mask is of a kind that is not supported (a block mask?); load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    if mask.dim() == 2:
        visible = mask[:, -tokens:].bool()
    else:
        if mask.shape[-1] != tokens:
            raise InvalidInput(
                f"attention_mask: a 4D mask of {mask.shape[-1]} keys cannot be used over a RaggedCache that holds "
                "keys already; give the 2D mask of 0 and 1"
            )
        itself = mask[:, 0].diagonal(dim1=1, dim2=2)
        visible = itself if mask.dtype == torch.bool else itself > torch.finfo(mask.dtype).min / 2
    return None if look and bool(visible.all()) else visible
