"""`enforce`: what a kvpress press selects head by head, really freed.

kvpress marks what it drops in index tensors on the attention modules and goes on holding all of it; at decode it
overwrites the marked keys with a fake one. Here the press runs as it stands, over a cache of its own that nobody else
sees; then what it marked becomes the kept set of a `RaggedCache`, layer by layer, and the full cache is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InvalidInput
from ..ragged.cache import CACHE_ARGUMENTS, RaggedCache
from .scores import (
    attention_modules,
    decoder_of,
    explained,
    first_line,
    hang_rotary,
    is_a,
    is_press,
    kvpress,
    raised_in_kvpress,
    refuse_batch,
    refuse_without_tokenizer,
    untouched,
)

_FREES = "already frees what it drops, and does not say which positions: use it with a DynamicCache"
_DECODES = "compresses while tokens are decoded, a RaggedCache after the context alone"
# Presses whose selection is not a set of positions of the context, and why.
_REFUSED = {
    "BlockPress": _FREES,
    "ChunkPress": _FREES,
    "ChunkKVPress": _FREES,
    "ComposedPress": _FREES,
    "FinchPress": _FREES,
    "KeyRerotationPress": "moves the keys that it keeps to other positions: use it with a DynamicCache",
    "MergingPress": "changes the values that it keeps: use it with a DynamicCache",
    "SimLayerKVPress": _FREES,
    "ThinKPress": "drops channels of keys, not keys",
    "DecodingPress": _DECODES,
    "PrefillDecodingPress": _DECODES,
    "RestoreKVPress": "adds tokens of its own to the cache",
}
# kvpress takes one sequence at a time in these.
_SINGLE = ("KVzipPress", "FastKVzipPress", "KVComposePress")
_REPLAYS = ("KVzipPress",)


def enforce(press: Any) -> EnforcedPress:
    """Turn a kvpress press into one that frees what it drops: same selection, bytes given back.

        with enforce(AdaKVPress(SnapKVPress(0.75)))(model):
            model(context_ids, past_key_values=cache)  # an empty RaggedCache

    Parameters
    ----------
    press : kvpress press
        Head by head: AdaKV and CriticalAdaKV over any scorer, KVzip, KVgrad, FastKVzip, LU-KV, DuoAttention, DMS
        without decoding. The same count in every head: any ScorerPress, PyramidKV, per-layer ratios.

    Raises
    ------
    InvalidInput
        Not a kvpress press, or one whose kept positions cannot be known; says which and why.
    """
    return EnforcedPress(press)


class EnforcedPress:
    """A kvpress press over a `RaggedCache`; see `enforce`.

    As a context manager around a model it takes one forward pass with an empty RaggedCache. When the block ends the
    cache holds what the press kept, at its true positions, and is marked for `rollback`. Padding that the attention
    mask names, and keys that a sliding layer can never show again, are not held whatever the press says. No gradients
    are recorded inside. When the block ends with an exception the cache is empty; the model is as it was either way.

    Attributes
    ----------
    press : the kvpress press
    """

    def __init__(self, press: Any) -> None:
        if isinstance(press, type):
            raise InvalidInput(f"enforce: got the class {press.__name__}; give an instance, {press.__name__}(...)")
        if not is_press(press):
            kvpress()  # where it is missing, that is the news
            raise InvalidInput(f"enforce: expected a kvpress press, got {type(press).__name__}")
        self.press, self.name = press, type(press).__name__
        for kind, reason in _REFUSED.items():
            if is_a(press, kind):
                raise InvalidInput(f"enforce: {self.name} {reason}")
        if is_a(press, "KVComposePress"):
            raise InvalidInput(
                f"enforce: {self.name} {_FREES if press.structured else 'keeps its replay in the cache'}"
            )
        if is_a(press, "DMSPress") and press.decoding:
            raise InvalidInput(f"enforce: {self.name} with decoding=True {_DECODES}; make it with decoding=False")

    def __repr__(self) -> str:
        return f"enforce({self.press!r})"

    @property
    def compression_ratio(self) -> float:
        """Fraction removed, as the press says it."""
        return self.press.compression_ratio

    @contextmanager
    def __call__(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the press compress what `model` reads inside the block into an empty RaggedCache.

        Raises
        ------
        InvalidInput
            Before or in the forward pass: the model is in training mode, no RaggedCache is given, it is not empty, a
            second forward pass, a batch for a press that takes one sequence, whatever kvpress refuses.
        """
        modules = attention_modules(model)
        if model.training:
            raise InvalidInput(f"{self!r}: the model is in training mode; call model.eval() first")
        if any(is_a(self.press, replays) for replays in _REPLAYS):
            refuse_without_tokenizer(model, self.name)
        run = _Run(self.name, self.press)
        # A cache has no use for gradients, and kvpress replays outside the caller's no_grad.
        with torch.no_grad(), untouched(model), _selection_noted(self.press, run.kept), run.swapping(model):
            for module in modules:
                module.masked_key_indices = None  # an earlier press's mask is none of this context
            inside = self.press(model)
            with explained(self.name):
                inside.__enter__()
            hang_rotary(model)  # kvpress's own does not know Gemma 3's two
            try:
                yield
            except BaseException as error:
                inside.__exit__(type(error), error, error.__traceback__)
                if isinstance(error, Exception) and raised_in_kvpress(error):
                    raise InvalidInput(f"{self.name}: kvpress refuses: {first_line(error)}") from error
                raise
            with explained(self.name):
                inside.__exit__(None, None, None)
            run.move(modules)


class _Run:
    """One block: the caller's cache, the full one that the press works on, and what is kept of it."""

    def __init__(self, name: str, press: Any) -> None:
        self.name, self.press = name, press
        self.cache: RaggedCache | None = None
        self.full: DynamicCache | None = None
        self.padding: torch.Tensor | None = None
        self.kept: dict[int, torch.Tensor] = {}  # layer -> bool (B, H, N), of presses that truncate

    @contextmanager
    def swapping(self, model: torch.nn.Module) -> Iterator[None]:
        """Forward passes inside see the full cache where the caller's is given, and give back the caller's."""
        # On the decoder's own level, so that a call of either model is met.
        base = getattr(model, "base_model", None) or decoder_of(model)
        hooks = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def move(self, modules: list[torch.nn.Module]) -> None:
        """Fill the caller's cache with what is kept, letting go of the full one layer by layer."""
        if self.full is None:
            return
        dropped = {module.layer_idx: module.masked_key_indices for module in modules}
        tokens = self.tokens
        for index, layer in enumerate(self.full.layers):
            held = layer.keys.shape[2]
            if held != tokens:
                raise InvalidInput(f"enforce: {self.name} left {held} of {tokens} keys in layer {index}: it {_FREES}")
        try:
            for index, layer in enumerate(self.full.layers):
                keys, values = layer.keys, layer.values
                layer.keys = layer.values = None
                keep = self._keep(index, keys, dropped.get(index))
                self.cache.take(index, keys, values, keep, tokens)
                del keys, values  # before the next layer's copy is made
            self.cache.mark()
        except BaseException:
            self.cache.reset()
            raise

    def _keep(self, index: int, keys: torch.Tensor, dropped: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
        keep = self.kept.pop(index, None)
        if keep is None:
            keep = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
        if dropped is not None:
            keep[tuple(part.to(keys.device) for part in dropped)] = False
        if self.padding is not None:
            keep &= self.padding[:, None].to(keys.device)
        window = self.cache.layers[index].window
        if window is not None:
            keep[:, :, : max(keys.shape[2] - window + 1, 0)] = False
        return keep

    def _before(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        name = next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        cache = kwargs[name] if name else next((given for given in args if isinstance(given, Cache)), None)
        if cache is not None and cache is self.full:  # the press replays
            return None
        if not isinstance(cache, RaggedCache):
            raise InvalidInput(
                f"enforce({self.name}): expected past_key_values=RaggedCache(model.config), got "
                f"{'no cache' if cache is None else type(cache).__name__}"
            )
        if self.full is not None:
            raise InvalidInput(
                f"enforce({self.name}): a second forward pass inside the block; feed the whole context in one, and "
                "generate after the block"
            )
        if cache.get_seq_length():
            raise InvalidInput(
                f"enforce({self.name}): the cache holds {cache.get_seq_length()} tokens of another context; reset() "
                "it, or make a new one"
            )
        ids = kwargs.get("input_ids", args[0] if args and isinstance(args[0], torch.Tensor) else None)
        given = ids if ids is not None else kwargs.get("inputs_embeds")
        if given is None or given.shape[1] == 0:
            raise InvalidInput(f"enforce({self.name}): the context is empty, expected at least one token")
        if any(is_a(self.press, single) for single in _SINGLE):
            refuse_batch(self.name, given.shape[0])
        if ids is None and any(is_a(self.press, replays) for replays in _REPLAYS):
            raise InvalidInput(f"enforce({self.name}): it replays the context, which needs input_ids, not embeddings")
        mask = kwargs.get("attention_mask")
        if mask is not None:
            if not isinstance(mask, torch.Tensor) or mask.shape != given.shape[:2]:
                raise InvalidInput(
                    f"enforce({self.name}): expected attention_mask of shape {tuple(given.shape[:2])}, got "
                    f"{tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__}"
                )
            self.padding = mask.bool()
        self.cache, self.tokens = cache, given.shape[1]
        self.full = DynamicCache()  # without a config: kvpress needs every key, in sliding layers too
        if name:
            return args, {**kwargs, name: self.full}
        return tuple(self.full if item is cache else item for item in args), kwargs

    def _after(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self.cache if item is self.full else item for item in output)
        for name in CACHE_ARGUMENTS:
            if output.get(name) is self.full and self.full is not None:
                output[name] = self.cache
        return output


@contextmanager
def _selection_noted(press: Any, kept: dict[int, torch.Tensor]) -> Iterator[None]:
    """Let a press that keeps the same count in every head note what it keeps in `kept`, and truncate nothing."""
    scorer = press.press if is_a(press, "PerLayerCompressionPress") else press
    library = kvpress()
    own = getattr(type(scorer), "compress", None)
    if own not in (library.ScorerPress.compress, library.PyramidKVPress.compress):
        yield
        return

    def noted(
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: dict,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scorer.compression_ratio:
            scores = scorer.score(module, hidden_states, keys, values, attentions, kwargs)
            chosen = scores.topk(_count(scorer, module, keys.shape[2]), dim=-1).indices
            kept[module.layer_idx] = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        return keys, values

    scorer.compress = noted
    try:
        yield
    finally:
        del scorer.compress


def _count(scorer: Any, module: torch.nn.Module, tokens: int) -> int:
    """Keys that a ScorerPress keeps in each head, by kvpress's own rule."""
    if is_a(scorer, "PyramidKVPress"):
        return scorer.get_layer_budget(module, tokens)
    from kvpress.utils import compute_n_kept

    return compute_n_kept(tokens, scorer.compression_ratio)
