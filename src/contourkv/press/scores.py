"""Scores of keys, borrowed: from kvpress, or from any function with the signature of its scorers.

How important a key is, and how many keys a head gets, are two questions. This module answers the first by calling
kvpress, whose formulas are not written a second time here; the second is the allocator's. A scorer gives one number
for each key of each KV head, the higher the more worth keeping, for each sequence what it gets alone: batches are
scored one sequence at a time, padding cut off.

kvpress is imported when one of its scores is asked for, and what it hangs on a model is taken off again.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch

from ..errors import InvalidInput
from .budget import Budget

# Name of a score -> kvpress's class, of those that score keys without a download and without eager attention.
PRESSES = {
    "compactor": "CompactorPress",
    "expected_attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "kvzip": "KVzipPress",
    "lagkv": "LagKVPress",
    "leverage": "LeverageScorePress",
    "noncausal": "NonCausalAttnPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}
MASS = "mass"
ARGUMENTS = ("module", "hidden_states", "keys", "values", "attentions", "kwargs")  # of kvpress's `score`
INSTALL = "pip install 'contourkv[benchmark]'"

# Presses that split a budget over the scores of another: the scores are those of the inner press.
_SPLITS = ("AdaKVPress", "DMSPress", "LUKVPress", "PerLayerCompressionPress")
# kvpress rebuilds the queries or keys of these from hidden states.
_REBUILDS = {
    "CapPress",
    "CompactorPress",
    "ExpectedAttentionPress",
    "KVzipPress",
    "LeverageScorePress",
    "NonCausalAttnPress",
    "SnapKVPress",
    "TOVAPress",
}
_INSTRUCTION = "Repeat the previous context"
# Attributes that kvpress sets on modules of a model, and leaves there.
_TRACES = ("masked_key_indices", "rotary_emb", "forward", "original_forward_KVComposePress")

ScoreFunction = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Mapping], torch.Tensor
]


class Scorer:
    """What scores keys.

    Attributes
    ----------
    name : str
        For messages.
    is_mass : bool
        Whether the scores are softmax weights, so that what is dropped of them is mass dropped.
    """

    name: str
    is_mass = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Make ready to score keys of `model`; afterwards nothing is left on it, whatever ended the block.

        Raises
        ------
        InvalidInput
            The model cannot be scored: says why, before anything is computed.
        """
        yield

    def protected(self, tokens: int) -> tuple[int, int]:
        """How many of the first and of the last of `tokens` keys have a filler for a score: keep them by rule."""
        return 0, 0


class WindowMass(Scorer):
    """Mass that the last rows of the context put on each key: the press observes it itself, nothing is borrowed."""

    name, is_mass = MASS, True

    def of(self, masses: torch.Tensor) -> torch.Tensor:
        """The scores: the masses (B, H, N) as observed."""
        return masses


class LayerScorer(Scorer):
    """Scores the keys of one layer right after that layer has attended to the context.

    Parameters
    ----------
    function : callable
        `function(module, hidden_states, keys, values, attentions, kwargs)` -> scores (1, H, N), as kvpress's
        `score`, called for one sequence at a time. If it has an attribute `is_mass`, that is taken.
    name : str, optional
        Default: the function's own.
    """

    def __init__(self, function: ScoreFunction, name: str | None = None) -> None:
        self._function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.is_mass = bool(getattr(function, "is_mass", False))

    def score(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One score for each key.

        Parameters
        ----------
        module : the attention module, with `layer_idx`
        hidden_states : (B, Q, hidden)
            Its input; Q <= N, the last Q tokens.
        keys, values : (B, H, N, d), (B, H, N, dv)
            Keys with their positions applied.
        attentions : (B, heads, Q, N) or None
            Weights, where the model attends eagerly.
        kwargs : keyword arguments of the module's forward pass
            `position_embeddings` (cos, sin), each (B or 1, Q, d), is what kvpress reads.
        visible : bool (B, N), optional
            False at padding, which must lie at one or both ends of a sequence.

        Returns
        -------
        tensor (B, H, N)
            float32 (float64 if the scores were), finite. Padding gets the lowest score of its head.

        Raises
        ------
        InvalidInput
            The scorer refuses the input, or gives something else than finite (1, H, N).
        """
        sequences, heads, tokens = keys.shape[:3]
        queries = hidden_states.shape[1]
        rows = []
        for index in range(sequences):
            first, end = (0, tokens) if visible is None else self._run(visible[index], index)
            start = max(first - (tokens - queries), 0)  # where this sequence's tokens start among the hidden states
            stop = queries - (tokens - end)
            one = slice(index, index + 1)
            found = self._one(
                module,
                hidden_states[one, start:stop],
                keys[one, :, first:end],
                values[one, :, first:end],
                None if attentions is None else attentions[one, :, start:stop, first:end],
                kwargs if visible is None and sequences == 1 else _of_sequence(kwargs, index, start, stop),
            )
            found = checked(self.name, module.layer_idx, found, (1, heads, end - first))
            if end - first < tokens:
                lowest = found.amin(dim=-1, keepdim=True)
                found = torch.cat([lowest.expand(-1, -1, first), found, lowest.expand(-1, -1, tokens - end)], dim=-1)
            rows.append(found)
        return torch.cat(rows)

    def _one(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        return self._function(module, hidden_states, keys, values, attentions, kwargs)

    def _run(self, visible: torch.Tensor, index: int) -> tuple[int, int]:
        at = visible.nonzero().squeeze(1)
        if len(at) == 0:
            raise InvalidInput(f"attention_mask: sequence {index} is all padding; leave it out of the batch")
        first, end = int(at[0]), int(at[-1]) + 1
        if end - first != len(at):
            raise InvalidInput(
                f"attention_mask: sequence {index} has padding between its tokens; scores {self.name!r} need it at "
                "the ends"
            )
        return first, end


class PressScorer(LayerScorer):
    """Scores of a kvpress ScorerPress, called as it stands.

    Random draws (Compactor's Gaussian sketch) come from `seed` and the layer's number, and the global generators are
    as before afterwards. A context too short for a press is scored by a defined rule: SnapKV's window shrinks to
    half the context; where every key falls under the fixed sinks or windows of a press, all score the same.

    Parameters
    ----------
    press : kvpress ScorerPress
    name : str, optional
        Default: the press's class.
    seed : int
    ratio : float, optional
        Fraction of keys that will be removed: some scores blend or count by it (Compactor, StreamingLLM,
        CriticalKV). Default: the press's own. Settable; inside `on` the press has it, afterwards its own again.
    """

    def __init__(self, press: Any, name: str | None = None, seed: int = 0, ratio: float | None = None) -> None:
        super().__init__(press.score, name or type(press).__name__)
        self.press, self.seed = press, seed
        self.ratio = float(press.compression_ratio) if ratio is None else ratio
        self.is_mass = is_a(press, "SnapKVPress")

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        refuse_rebuilt_queries(model, self.press, self.name)
        former = self.press.compression_ratio
        with untouched(model):
            with explained(f"scores {self.name!r}"):
                self.press.post_init_from_model(model)
            try:
                hang_rotary(model)
                yield
            finally:
                self.press.compression_ratio = former

    def protected(self, tokens: int) -> tuple[int, int]:
        return _fixed(_fitted(self.press, tokens))

    def published(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """What the press itself ranks the keys of one sequence by: arguments as of `score`, fillers as they are."""
        self.press.compression_ratio = self.ratio
        press = _fitted(self.press, hidden_states.shape[1])
        first, last = _fixed(press)
        tokens = keys.shape[2]
        if tokens == 1 or tokens <= first + last:
            return torch.ones(keys.shape[:3], device=keys.device)
        with (
            explained(f"scores {self.name!r}, layer {module.layer_idx}"),
            _seeded(self.seed * 100_003 + module.layer_idx, keys),
        ):
            return press.score(module, hidden_states, keys, values, attentions, kwargs)

    def without_filler(self, scores: torch.Tensor, tokens: int) -> torch.Tensor:
        """Published scores (1, H, N) as masses, where they are: the filler of the last keys is a mass as well.

        SnapKV gives its window the maximum plus one, which is no mass; the heaviest mass of the head is one.
        """
        last = self.protected(tokens)[1]
        if not (self.is_mass and last and last < scores.shape[-1]):
            return scores
        scores = scores.clone()
        scores[..., -last:] = scores[..., :-last].amax(dim=-1, keepdim=True)
        return scores

    def _one(
        self,
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: torch.Tensor | None,
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        scores = self.published(module, hidden_states, keys, values, attentions, kwargs)
        # A score of another shape is refused by name, where it is checked.
        return scores if scores.shape != keys.shape[:3] else self.without_filler(scores, hidden_states.shape[1])


class ContextScorer(Scorer):
    """Scores the keys of all layers once the model has read the whole context."""

    def score_context(self, model: torch.nn.Module, ids: torch.Tensor, cache: Any) -> list[torch.Tensor]:
        """One score for each key of each layer.

        Parameters
        ----------
        model : transformers causal language model
        ids : int64 (1, N)
            The context.
        cache : DynamicCache made without a config
            Holds all N keys of the context in every layer, and holds the very same tensors afterwards.

        Returns
        -------
        list of tensors (1, H, N), one a layer, float32, finite
        """
        raise NotImplementedError


class ReplayScorer(ContextScorer):
    """KVzip's scores: the largest weight that each key gets while the model repeats the context in chunks.

    kvpress's own replay runs over the cache; a key that it never looks at (its chat template before the context)
    scores 0. One sequence at a time, and the model needs a tokenizer beside its weights.

    Parameters
    ----------
    press : kvpress KVzipPress or KVgradPress
    name : str, optional
    """

    def __init__(self, press: Any, name: str | None = None) -> None:
        self.press, self.name = press, name or type(press).__name__
        self.is_mass = type(press).__name__ == "KVzipPress" and not press.kvzip_plus_normalization

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        refuse_rebuilt_queries(model, self.press, self.name)
        refuse_without_tokenizer(model, self.name)
        press = copy.copy(self.press)
        with untouched(model):
            with explained(f"scores {self.name!r}"), press(model):
                pass  # kvpress refuses on entering what it cannot do; without a context it does nothing on leaving
            yield

    def score_context(self, model: torch.nn.Module, ids: torch.Tensor, cache: Any) -> list[torch.Tensor]:
        refuse_batch(self.name, ids.shape[0])
        modules = attention_modules(model)
        before = [(layer.keys, layer.values) for layer in cache.layers]
        for index, (keys, _) in enumerate(before):
            if keys is None or keys.dim() != 4 or keys.shape[2] != ids.shape[1]:
                held = "none" if keys is None or keys.dim() != 4 else keys.shape[2]
                raise InvalidInput(
                    f"scores {self.name!r}: layer {index} of the cache holds {held} of {ids.shape[1]} keys; "
                    "expected all of them, in a DynamicCache made without a config"
                )
        press = copy.copy(self.press)
        press.compression_ratio = 0.5  # at 0 kvpress replays nothing; nothing is selected here
        found: list[torch.Tensor] = []
        # What kvpress would turn into a selection is what is wanted.
        press.compress_post = lambda _: found.append(press.score_val)

        def replayed(module: torch.nn.Module, inputs: tuple, kwargs: dict, output: tuple) -> tuple:
            layer = cache.layers[module.layer_idx]
            press.score_kvzip(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
            # Not kvpress's slice: it would keep the replay's buffer alive.
            layer.keys, layer.values = before[module.layer_idx]
            return output

        press.forward_hook = replayed
        try:
            with torch.no_grad(), untouched(model), explained(f"scores {self.name!r}"):
                for module in modules:
                    module.masked_key_indices = None  # an earlier press's selection would be written into the keys
                with press(model):
                    press._context_ids, press._cache = ids, cache
        finally:
            for layer, (keys, values) in zip(cache.layers, before, strict=True):
                layer.keys, layer.values = keys, values
        scores = found[0]
        return [
            checked(self.name, index, scores[index], (1, keys.shape[1], ids.shape[1]))
            for index, (keys, _) in enumerate(before)
        ]


def resolve(scores: object, seed: int = 0, kept: Budget | None = None) -> Scorer:
    """What scores keys as `scores` asks.

    Parameters
    ----------
    scores : str, kvpress press or callable
        "mass" (observed by the press itself); a name of `PRESSES`; a ScorerPress or KVzipPress instance; a press
        that splits a budget over another's scores (AdaKV, LU-KV, DMS, per-layer ratios), which gives those scores;
        or a function with the signature of kvpress's `score`.
    seed : int
        Of random draws in scores.
    kept : Budget, optional
        Where it is a fraction, scores that depend on a ratio get it, whatever ratio the press was made with.

    Raises
    ------
    InvalidInput
        No such name, a press that scores no keys, a class instead of an instance, something else; kvpress is not
        installed.
    """
    ratio = float(1 - kept.amount) if kept is not None and kept.kind == "fraction" else None
    if isinstance(scores, Scorer):
        return scores
    if isinstance(scores, str):
        if scores == MASS:
            return WindowMass()
        if scores not in PRESSES:
            raise InvalidInput(
                f"scores: unknown name {scores!r}; expected {', '.join(sorted([MASS, *PRESSES]))}, a kvpress press or "
                "a function"
            )
        press = getattr(kvpress(), PRESSES[scores])()
        return ReplayScorer(press, scores) if scores == "kvzip" else PressScorer(press, scores, seed, ratio)
    if isinstance(scores, type):
        raise InvalidInput(f"scores: got the class {scores.__name__}; give an instance, {scores.__name__}()")
    if is_press(scores):
        return _press_scorer(scores, seed, ratio)
    if callable(scores):
        _check_signature(scores)
        return LayerScorer(scores)
    raise InvalidInput(
        f"scores: expected a name ({', '.join(sorted([MASS, *PRESSES]))}), a kvpress press or a function, got "
        f"{type(scores).__name__}"
    )


def _check_signature(function: Callable) -> None:
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except ValueError:  # of some built-in ones nothing is known
        return
    except TypeError as error:
        raise InvalidInput(f"scores: expected a function of {', '.join(ARGUMENTS)} ({error})") from None


def kvpress() -> ModuleType:
    """The package kvpress; raises InvalidInput where it cannot be imported."""
    try:
        import kvpress
    except ModuleNotFoundError as error:
        raise InvalidInput(f"scores and presses of kvpress need it installed ({error}): {INSTALL}") from error
    except Exception as error:  # an unfit transformers lets it fail in many ways
        raise InvalidInput(
            f"kvpress is installed but cannot be imported ({first_line(error)}); it needs transformers under 5.3: "
            f"{INSTALL}"
        ) from error
    return kvpress


def is_press(value: object) -> bool:
    """Whether `value` is an instance of a kvpress press; imports nothing."""
    return "kvpress" in sys.modules and is_a(value, "BasePress")


def checked(name: str, layer: int, scores: object, shape: tuple[int, ...]) -> torch.Tensor:
    """Scores of one layer as float32 (float64 stays); InvalidInput unless they are finite numbers of `shape`."""
    if not isinstance(scores, torch.Tensor):
        raise InvalidInput(
            f"scores {name!r}, layer {layer}: expected a tensor of shape {shape}, got {type(scores).__name__}"
        )
    if tuple(scores.shape) != shape:
        raise InvalidInput(
            f"scores {name!r}, layer {layer}: expected shape {shape} (sequences, KV heads, keys), got "
            f"{tuple(scores.shape)}"
        )
    if scores.is_complex() or scores.dtype == torch.bool:
        raise InvalidInput(f"scores {name!r}, layer {layer}: expected real numbers, got {scores.dtype}")
    scores = scores.detach()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    finite = torch.isfinite(scores)
    if not finite.all():
        sequence, head, key = (int(index) for index in (~finite).nonzero()[0])
        raise InvalidInput(
            f"scores {name!r}, layer {layer}: expected finite numbers, key {key} of KV head {head} scores "
            f"{float(scores[sequence, head, key])}"
        )
    return scores


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """The module of `model` that holds its decoder layers."""
    base = getattr(model, "base_model", model)
    decoder = getattr(base, "language_model", base)
    if not hasattr(decoder, "layers") or not all(hasattr(layer, "self_attn") for layer in decoder.layers):
        raise InvalidInput(
            f"model: {type(model).__name__} is not laid out as kvpress expects, model.layers[i].self_attn; use "
            f"scores={MASS!r}"
        )
    return decoder


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Attention module of each decoder layer."""
    return [layer.self_attn for layer in decoder_of(model).layers]


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Take off `model` afterwards what kvpress hangs on its modules: masks, rotary modules, replaced forwards.

    What was there before, such as another press's mask, is there again.
    """
    before = [(module, _traces(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, former in before:
            now = _traces(module)
            for name in now.keys() - former.keys():
                delattr(module, name)
            for name, value in former.items():
                if now.get(name) is not value:
                    setattr(module, name, value)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Whatever kvpress raises inside, as one line that begins with `what`; running out of memory stays what it is."""
    try:
        yield
    except (InvalidInput, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InvalidInput(f"{what}: kvpress refuses: {first_line(error)}") from error


@lru_cache(maxsize=8)  # a vocabulary of 262,144 takes 4 s to load
def _instruction_tokens(folder: str) -> int:
    from transformers import AutoTokenizer

    return len(
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).encode(_INSTRUCTION, add_special_tokens=False)
    )


def refuse_without_tokenizer(model: Any, name: str) -> None:
    """Raise InvalidInput unless there is a tokenizer where kvpress will look for one to write its instruction with.

    transformers makes an empty tokenizer of a folder that has none, without a word, and kvpress would replay without
    its instruction.
    """
    folder = getattr(model.config, "name_or_path", "")
    try:
        reason = "" if _instruction_tokens(folder) > 1 else "there is none"
    except Exception as error:  # transformers and the hub's client raise all kinds
        reason = first_line(error)
    if reason:
        raise InvalidInput(
            f"{name}: kvpress reads the tokenizer from the folder or repository that the model's config names "
            f"({folder or 'it names none'}): {reason}; load the model from a folder with tokenizer files"
        )


def refuse_batch(name: str, sequences: int) -> None:
    """Raise InvalidInput unless there is one sequence."""
    if sequences != 1:
        raise InvalidInput(
            f"{name}: got a batch of {sequences}; kvpress's implementation takes one sequence at a time (its limit): "
            "call it once for each"
        )


def refuse_rebuilt_queries(model: torch.nn.Module, press: Any, name: str) -> None:
    """Raise InvalidInput if kvpress would rebuild the queries of `model` without the norm that the model applies."""
    while press is not None and not any(is_a(press, rebuilds) for rebuilds in _REBUILDS):
        press = getattr(press, "press", None)
    if press is None:
        return
    known = ("Qwen3Attention", "Gemma3Attention")
    for module in attention_modules(model):
        if hasattr(module, "q_norm") and not any(is_a(module, attention) for attention in known):
            raise InvalidInput(
                f"scores {name!r}: kvpress rebuilds queries without the norm that {type(module).__name__} applies, so "
                f"they would be wrong; use scores={MASS!r}"
            )


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its class where there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def is_a(value: object, name: str) -> bool:
    """Whether a class of that name is among those of `value`: no import needed to ask."""
    return any(base.__name__ == name for base in type(value).__mro__)


def raised_in_kvpress(error: BaseException) -> bool:
    """Whether the innermost frame of an error is kvpress's own code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("kvpress.")


def _press_scorer(press: Any, seed: int, ratio: float | None) -> Scorer:
    kind = type(press).__name__
    if kind in ("KVzipPress", "KVgradPress"):
        return ReplayScorer(press)
    if is_a(press, "ScorerPress"):
        return PressScorer(press, seed=seed, ratio=ratio)
    inner = getattr(press, "press", None)
    if kind in _SPLITS and is_a(inner, "ScorerPress"):
        return PressScorer(inner, seed=seed, ratio=ratio)
    hint = f"; its inner press does: scores={type(inner).__name__}(...)" if is_a(inner, "ScorerPress") else ""
    raise InvalidInput(f"scores: {kind} gives no score for each key{hint}")


def _fitted(press: Any, tokens: int) -> Any:
    """The press, or a copy of it whose window fits a context of `tokens`."""
    if is_a(press, "CriticalKVPress"):
        inner = _fitted(press.press, tokens)
        if inner is not press.press:
            press = copy.copy(press)
            press.press = inner
    elif is_a(press, "SnapKVPress") and tokens <= press.window_size:
        press = copy.copy(press)
        press.window_size = tokens // 2
    return press


def _fixed(press: Any) -> tuple[int, int]:
    """First and last keys whose score is a filler that a press sets to keep them."""
    if is_a(press, "CriticalKVPress"):
        return _fixed(press.press)
    if is_a(press, "CompactorPress"):
        return press.sink_size_start, press.sink_size_end
    last = press.window_size if is_a(press, "SnapKVPress") else int(is_a(press, "TOVAPress"))
    return getattr(press, "n_sink", getattr(press, "num_sinks", 0)), last


def _of_sequence(kwargs: Mapping[str, Any], index: int, start: int, stop: int) -> dict[str, Any]:
    """Keyword arguments of a forward pass, for the tokens start..stop of one sequence of the batch."""
    cut = dict(kwargs)
    if (embeddings := kwargs.get("position_embeddings")) is not None:
        cut["position_embeddings"] = tuple(
            part[index : index + 1, start:stop] if part.shape[0] > 1 else part[:, start:stop] for part in embeddings
        )
    return cut


def hang_rotary(model: torch.nn.Module) -> None:
    """Give each attention module the rotary embedding of its decoder, where kvpress looks for it."""
    rotary = getattr(decoder_of(model), "rotary_emb", None)
    for module in () if rotary is None else attention_modules(model):
        if "layer_type" in inspect.signature(rotary.forward).parameters:  # Gemma 3: one base for each kind of layer
            module._modules.pop("rotary_emb", None)  # a press's; a function cannot take a module's place
            module.rotary_emb = partial(rotary, layer_type=module.config.layer_types[module.layer_idx])
        else:
            module.rotary_emb = rotary


def _traces(module: torch.nn.Module) -> dict[str, object]:
    return {name: store[name] for store in (vars(module), module._modules) for name in _TRACES if name in store}


@contextmanager
def _seeded(seed: int, like: torch.Tensor) -> Iterator[None]:
    """Global generators start from `seed` inside, and are as before afterwards."""
    on_cuda = like.is_cuda
    with torch.random.fork_rng(range(torch.cuda.device_count()) if on_cuda else []):
        (torch.manual_seed if on_cuda else torch.default_generator.manual_seed)(seed)
        yield
