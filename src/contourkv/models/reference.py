"""Small language models trained here, from a seed, so that an architecture is measured on learned attention.

The training is one plain loop: AdamW, a warm-up and a cosine, windows drawn in an order fixed by the seed. On one
machine the same settings and texts give the same bytes, whether or not the training was cut off and taken up again.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import provenance
from ..errors import InvalidInput, InvariantBroken
from ..operator import whole_number
from ..plain import parse_json
from ..progress import Progress
from .byte_pairs import BOS_ID, EOS_ID, LEAST_VOCABULARY, PAD_ID, bytes_of_tokens, check_saved, train_byte_pairs
from .count_models import CountModel
from .trained_source import RECORD, read_record

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# model_type -> the architecture's name in a label
ARCHITECTURES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "olmo2": "OLMo-2"}
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
PHASE = ("window", "batch", "steps")
MOST_BYTES = 4_000_000
"""What the weights may take in bfloat16: they are kept in the repository."""
EMBEDDING_SCALE = 0.04
LOSS = "loss.csv"


@dataclass(frozen=True)
class ArmText:
    """The text of one arm.

    Attributes
    ----------
    training : tuple of str
        Documents that the tokenizer and the model learn from.
    held_out : tuple of str
        Texts out of other documents, each of at least a window's tokens; the loss is taken on the first window.
    source : mapping
        Where the text comes from: `package`, `version`, `wheel_sha256`.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    source: Mapping[str, str]


@dataclass(frozen=True)
class TrainingSettings:
    """What one training depends on beside its texts; checked when it is made.

    Attributes
    ----------
    architecture : {"qwen2", "qwen3", "olmo2"}
    sizes : mapping
        `hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`,
        `head_dim`, as transformers names them.
    vocabulary : int
        Tokens of the tokenizer.
    adds_bos : bool
        Whether every text, and so every window that is trained on, begins with BOS.
    arms : mapping
        Arm -> `share`, the chance with which a window is drawn from it, up to a factor; and `held_out_seed`.
    held_out : mapping
        `windows` of each arm on which the final loss is taken; `along` of them on which it is taken meanwhile.
    phases : sequence of mappings
        One after another: `steps` steps, each of `batch` windows of `window` tokens. The last window is the model's
        longest context.
    learning_rate, last_rate : float
        The peak, and the share of it that is left at the end.
    warmup : int
        Steps of the linear rise to the peak.
    weight_decay, beta1, beta2 : float
        AdamW; only matrices decay.
    clip : float
        Norm to which longer gradients are cut.
    evaluate_every : int
        Steps between two rows of the loss curve.
    threads : int
        Of torch; another number gives other bytes.
    seeds : mapping
        `weights`, of the first weights, and `order`, of the windows.
    """

    architecture: str
    sizes: Mapping[str, int]
    vocabulary: int
    adds_bos: bool
    arms: Mapping[str, Mapping]
    held_out: Mapping[str, int]
    phases: Sequence[Mapping[str, int]]
    learning_rate: float
    last_rate: float
    warmup: int
    weight_decay: float
    beta1: float
    beta2: float
    clip: float
    evaluate_every: int
    threads: int
    seeds: Mapping[str, int]

    @classmethod
    def read(cls, settings: Mapping) -> TrainingSettings:
        """The settings of a mapping that has these keys and no others.

        Raises
        ------
        InvalidInput
            One line that names the key, what was expected and what was got.
        """
        _keys("settings", settings, [field.name for field in fields(cls)])
        return cls(**settings)

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise InvalidInput(f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}")
        if not isinstance(self.adds_bos, bool):
            raise InvalidInput(f"adds_bos: expected true or false, got {self.adds_bos!r}")
        _whole("sizes", self.sizes, SIZES, 1)
        heads, kv_heads = self.sizes["num_attention_heads"], self.sizes["num_key_value_heads"]
        if heads % kv_heads:
            raise InvalidInput(f"sizes.num_attention_heads: expected a multiple of {kv_heads} KV heads, got {heads}")
        if self.sizes["head_dim"] % 2:
            raise InvalidInput(f"sizes.head_dim: expected an even number to rotate, got {self.sizes['head_dim']}")
        whole_number("vocabulary", self.vocabulary, LEAST_VOCABULARY)
        _keys("arms", self.arms, None)
        for arm, entry in self.arms.items():
            _keys(f"arms.{arm}", entry, ("share", "held_out_seed"))
            _real(f"arms.{arm}.share", entry["share"], above=0.0)
            whole_number(f"arms.{arm}.held_out_seed", entry["held_out_seed"], 0)
        _whole("held_out", self.held_out, ("windows", "along"), 1)
        if self.held_out["along"] > self.held_out["windows"]:
            raise InvalidInput(
                f"held_out.along: expected at most the {self.held_out['windows']} windows, got {self.held_out['along']}"
            )
        if not isinstance(self.phases, Sequence) or isinstance(self.phases, str) or not self.phases:
            raise InvalidInput(f"phases: expected a list of at least one phase, got {self.phases!r}")
        for number, phase in enumerate(self.phases):
            _whole(f"phases[{number}]", phase, PHASE, 1)
        if self.window < 16:
            raise InvalidInput(f"phases[{len(self.phases) - 1}].window: expected at least 16 tokens, got {self.window}")
        _real("learning_rate", self.learning_rate, above=0.0)
        _real("last_rate", self.last_rate, least=0.0, most=1.0)
        whole_number("warmup", self.warmup, 0)
        if self.warmup >= self.steps:
            raise InvalidInput(f"warmup: expected fewer than the {self.steps} steps, got {self.warmup}")
        _real("weight_decay", self.weight_decay, least=0.0)
        for name in ("beta1", "beta2"):
            _real(name, getattr(self, name), least=0.0, below=1.0)
        _real("clip", self.clip, above=0.0)
        whole_number("evaluate_every", self.evaluate_every, 1)
        whole_number("threads", self.threads, 1)
        _whole("seeds", self.seeds, ("weights", "order"), 0)

    @property
    def window(self) -> int:
        """Tokens of the longest context: those of the last phase."""
        return self.phases[-1]["window"]

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase["steps"] for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens that are predicted, over all steps."""
        return sum(math.prod(phase[key] for key in PHASE) for phase in self.phases)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0: a linear rise, then half a cosine."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)
        return self.learning_rate * (self.last_rate + (1 - self.last_rate) * 0.5 * (1 + math.cos(math.pi * done)))

    def config(self, vocabulary: int) -> PretrainedConfig:
        """transformers' config of the model, for a tokenizer of so many tokens."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.architecture,
            **self.sizes,
            vocab_size=vocabulary,
            max_position_embeddings=self.window,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
        )


def train_reference_model(
    settings: Mapping,
    texts: Mapping[str, ArmText],
    out_folder: str | os.PathLike,
    checkpoint_seconds: float = 180.0,
) -> dict:
    """Train a tokenizer and a model from their seeds, and write both into `out_folder`.

    A file `.checkpoint-<name>.safetensors` beside the folder holds the state of the training every
    `checkpoint_seconds`; a training that was cut off goes on from it, and ends with the bytes it would have had. It
    is removed at the end. A checkpoint of other settings, texts or versions is not used.

    Parameters
    ----------
    settings : mapping
        See `TrainingSettings`.
    texts : mapping of str to ArmText
        Text of each arm of the settings.
    out_folder : path
        Its name is the model's. It is written whole or not at all; one that is there is replaced.
    checkpoint_seconds : float
        Wall time; changes no result.

    Returns
    -------
    dict
        What training.json says.

    Raises
    ------
    InvalidInput
        A bad setting, an arm without text, too little text, weights that take more than 4 MB.
    InvariantBroken
        A loss that is not finite; a tokenizer that does not come back as it was saved.

    Notes
    -----
    The folder holds config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
    tokenizer_config.json; loss.csv, a row every `evaluate_every` steps, in nats per token (held-out windows are whole
    there, even while shorter ones are trained on); and training.json:
    `label`, `settings`, `parameters`, `tokens`, `texts` with their SHA-256, `held_out` (by arm, of the weights that
    were written: `nats`, a token, `perplexity`, `bits_per_byte`), `baselines` (of the same tokens), `heads` and
    `repeats` (see `head_kinds`), `files` with their SHA-256, `provenance`.
    """
    plan = TrainingSettings.read(settings)
    out_folder = Path(out_folder)
    name = out_folder.name
    _check_texts(plan, texts)
    _check_size(plan)

    import tokenizers
    import torch
    import transformers

    say = _sayer(name)
    with _repeatable(plan.threads):
        documents = [text for arm in sorted(plan.arms) for text in texts[arm].training]
        say(f"train a tokenizer of {plan.vocabulary:,} tokens on {sum(map(len, documents)):,} characters")
        tokenizer = train_byte_pairs(documents, plan.vocabulary, plan.window, plan.adds_bos)
        config = plan.config(len(tokenizer))
        check_saved(tokenizer, config, name)
        arms = {arm: _encode(arm, texts[arm], tokenizer, plan) for arm in sorted(plan.arms)}
        say(f"{sum(each.stream.size for each in arms.values()):,} tokens to train on, {plan.tokens:,} to be read")
        made_with = provenance.digest(
            {
                "settings": asdict(plan),
                "texts": {arm: each.facts for arm, each in arms.items()},
                "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
                "versions": [provenance.VERSION, torch.__version__, transformers.__version__, tokenizers.__version__],
            }
        )
        model = seeded_model(config, plan.seeds["weights"])
        say(f"{parameters(model):,} parameters")
        training = _Training(plan, model, arms, out_folder.parent / f".checkpoint-{name}.safetensors", made_with)
        curve = training.run(name, checkpoint_seconds)
        record = _write(plan, out_folder, model, tokenizer, arms, curve)
        training.checkpoint.unlink(missing_ok=True)
    for arm, held in record["held_out"].items():
        say(f"{arm}: {held['nats']:.3f} nats a token, {held['bits_per_byte']:.3f} bits a byte, held out")
    return record


def seeded_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A model of `config` in float32, its weights drawn from the seed.

    Matrices are normal with variance 1 / inputs, those that write into the residual stream divided by twice the
    layers; embeddings have a standard deviation of 0.04, so that first logits are small. Norms are 1, biases 0.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(0.0 if key.endswith("bias") else 1.0)
                continue
            scale = EMBEDDING_SCALE if "embed_tokens" in key else weight.shape[1] ** -0.5
            if key.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= math.sqrt(2 * config.num_hidden_layers)
            weight.normal_(0.0, scale, generator=generator)
    return model


def parameters(model: PreTrainedModel) -> int:
    """Numbers in the weights; tied ones count once."""
    return sum(weight.numel() for weight in model.parameters())


@dataclass(frozen=True)
class Comparison:
    """How two trained folders differ.

    Attributes
    ----------
    differing : tuple of str
        Files that are not the same bytes, or in one folder only.
    weights : float
        Largest difference of a weight; infinite where names or shapes differ.
    nats : dict of str to float
        Held-out loss of the second less that of the first, by arm.
    """

    differing: tuple[str, ...]
    weights: float
    nats: dict[str, float]

    @property
    def identical(self) -> bool:
        """Whether every file is the same, byte for byte."""
        return not self.differing

    def __str__(self) -> str:
        if self.identical:
            return "byte-identical"
        losses = ", ".join(f"{arm} {change:+.4f}" for arm, change in self.nats.items())
        return (
            f"{', '.join(self.differing)} differ; weights by up to {self.weights:.3g}, held-out nats a token: {losses}"
        )


def compare(committed: str | os.PathLike, made: str | os.PathLike) -> Comparison:
    """Compare two trained folders: file by file, and where they differ by how much.

    Raises
    ------
    InvalidInput
        One of them is not the folder of a trained model.
    """
    from safetensors.torch import load_file

    folders = Path(committed), Path(made)
    records = [read_record(folder) for folder in folders]
    files = [{path.name: provenance.file_sha256(path) for path in folder.iterdir()} for folder in folders]
    differing = tuple(sorted(file for file in {*files[0], *files[1]} if files[0].get(file) != files[1].get(file)))
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    if {key: weight.shape for key, weight in first.items()} != {key: weight.shape for key, weight in second.items()}:
        weights = math.inf
    else:
        weights = max(float((first[key].double() - second[key].double()).abs().max()) for key in first)
    held = [record["held_out"] for record in records]
    nats = {arm: held[1][arm]["nats"] - held[0][arm]["nats"] for arm in sorted(held[0].keys() & held[1].keys())}
    return Comparison(differing, weights, nats)


# ---------------------------------------------------------------- the texts as tokens


@dataclass(frozen=True)
class _ArmTokens:
    """An arm in tokens: `stream` (n,) int32, documents and EOS in turn; `held_out` (windows, window) int64."""

    stream: np.ndarray
    held_out: np.ndarray
    facts: dict


def _encode(arm: str, text: ArmText, tokenizer: PreTrainedTokenizerFast, plan: TrainingSettings) -> _ArmTokens:
    backend = tokenizer.backend_tokenizer
    pieces = []
    for document in text.training:
        pieces.append(np.array(backend.encode(document, add_special_tokens=False).ids, np.int32))
        pieces.append(np.array([EOS_ID], np.int32))
    stream = np.concatenate(pieces)
    longest = max(phase["window"] for phase in plan.phases)
    if stream.size <= longest:
        raise InvalidInput(f"arm {arm}: its training part has {stream.size:,} tokens, windows take {longest:,}")
    held_out = []
    pieces = text.held_out[: plan.held_out["windows"]]
    for number, piece in enumerate(pieces):
        ids = backend.encode(piece).ids[: plan.window]
        if len(ids) < plan.window:
            raise InvalidInput(
                f"arm {arm}: held-out text {number} has {len(ids):,} tokens, a window takes {plan.window:,}"
            )
        held_out.append(ids)
    facts = {
        **text.source,
        "training": {"documents": len(text.training), "sha256": _sha256(text.training), "tokens": int(stream.size)},
        "held_out": {"windows": len(held_out), "sha256": _sha256(pieces)},
    }
    return _ArmTokens(stream, np.array(held_out, np.int64), facts)


def _sha256(texts: Sequence[str]) -> str:
    """SHA-256 over the SHA-256 of each text."""
    total = hashlib.sha256()
    for text in texts:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _schedule(plan: TrainingSettings, arms: Mapping[str, _ArmTokens]) -> Iterator[tuple[dict, list[tuple[str, int]]]]:
    """For each step its phase, and arm and first token of each of its windows.

    Arms are drawn by their shares. The windows of an arm lie side by side from a random first token, and each is
    taken once before any is taken again, from another first token.
    """
    rng = np.random.default_rng(plan.seeds["order"])
    names = sorted(arms)
    shares = np.array([plan.arms[arm]["share"] for arm in names], np.float64)
    for phase in plan.phases:
        # of a window, one token more is needed where none is BOS
        take = phase["window"] + (not plan.adds_bos)
        waiting: dict[str, list[int]] = {arm: [] for arm in names}
        for _ in range(phase["steps"]):
            chosen = []
            for arm in rng.choice(len(names), size=phase["batch"], p=shares / shares.sum()):
                starts = waiting[names[arm]]
                if not starts:
                    size = arms[names[arm]].stream.size
                    first = int(rng.integers(min(phase["window"], size - take + 1)))
                    starts.extend(rng.permutation(np.arange(first, size - take + 1, phase["window"])).tolist())
                chosen.append((names[arm], starts.pop()))
            yield phase, chosen


# ---------------------------------------------------------------- the training


class _Training:
    """The loop over the steps, and its state in a checkpoint."""

    def __init__(
        self,
        plan: TrainingSettings,
        model: PreTrainedModel,
        arms: Mapping[str, _ArmTokens],
        checkpoint: Path,
        made_with: str,
    ) -> None:
        import torch

        self.plan, self.model, self.arms = plan, model, arms
        self.checkpoint, self.made_with = checkpoint, made_with
        self.weights = dict(sorted(model.named_parameters()))
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [weight for weight in self.weights.values() if weight.ndim > 1]},
                {"params": [weight for weight in self.weights.values() if weight.ndim == 1], "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
            betas=(plan.beta1, plan.beta2),
            weight_decay=plan.weight_decay,
            foreach=False,
        )

    def run(self, name: str, checkpoint_seconds: float) -> list[dict]:
        """Go through the steps that are not done yet; return the rows of the loss curve."""
        done, tokens, curve, since = self._resume(name)
        progress = Progress(self.plan.tokens, f"train {name}", "tokens", interval=30.0, before=tokens)
        if not curve:
            curve.append(self._row(0, 0, None))
        saved = time.monotonic()
        self.model.train()
        for step, (phase, chosen) in enumerate(_schedule(self.plan, self.arms)):
            if step < done:
                continue
            loss = self._step(step, phase, chosen)
            if not math.isfinite(loss):
                raise InvariantBroken(f"{name}: the loss of step {step + 1} is {loss}; lower learning_rate")
            count = phase["window"] * phase["batch"]
            tokens += count
            since.append(loss)
            if (step + 1) % self.plan.evaluate_every == 0 or step + 1 == self.plan.steps:
                curve.append(self._row(step + 1, tokens, math.fsum(since) / len(since)))
                since = []
            if time.monotonic() - saved >= checkpoint_seconds and step + 1 < self.plan.steps:
                self._save({"step": step + 1, "tokens": tokens, "curve": curve, "since": since})
                saved = time.monotonic()
            progress.advance(count)
        progress.close()
        self.model.eval()
        return curve

    def _step(self, step: int, phase: Mapping[str, int], chosen: Sequence[tuple[str, int]]) -> float:
        import torch

        lead = [BOS_ID] * self.plan.adds_bos
        size = phase["window"] + 1 - len(lead)
        rows = torch.tensor(
            np.array([[*lead, *self.arms[arm].stream[start : start + size]] for arm, start in chosen], np.int64)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(step)
        logits = self.model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), self.plan.clip)
        self.optimizer.step()
        return float(loss.detach())

    def _row(self, step: int, tokens: int, training: float | None) -> dict:
        """A row of the loss curve: mean training loss since the last one, held-out loss now."""
        along = self.plan.held_out["along"]
        self.model.eval()
        held = {
            f"{arm}_nats": float(_nats(self.model, each.held_out[:along]).mean()) for arm, each in self.arms.items()
        }
        self.model.train()
        rate = self.plan.rate(max(step - 1, 0))
        return {"step": step, "tokens": tokens, "learning_rate": rate, "training_nats": training, **held}

    def _save(self, state: dict) -> None:
        from safetensors.torch import save_file

        tensors = {}
        for key, weight in self.weights.items():
            moments = self.optimizer.state[weight]
            tensors[f"weight/{key}"] = weight.detach()
            tensors[f"mean/{key}"] = moments["exp_avg"]
            tensors[f"square/{key}"] = moments["exp_avg_sq"]
        text = json.dumps({"made_with": self.made_with, **state})
        with provenance.atomic_path(self.checkpoint) as temporary:
            save_file(tensors, temporary, metadata={"contourkv": text})

    def _resume(self, name: str) -> tuple[int, int, list[dict], list[float]]:
        """Steps and tokens done, the loss curve, training losses since its last row: from the checkpoint, or none."""
        import torch
        from safetensors import SafetensorError, safe_open

        if not self.checkpoint.exists():
            return 0, 0, [], []
        say = _sayer(name)
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                state = parse_json((file.metadata() or {}).get("contourkv", "{}"))
                tensors = {key: file.get_tensor(key) for key in file.keys()}
        except (SafetensorError, OSError, ValueError) as error:
            say(f"the checkpoint cannot be read ({error}); starting anew")
            return 0, 0, [], []
        if state.get("made_with") != self.made_with:
            say("the checkpoint is one of other settings, texts or versions; starting anew")
            return 0, 0, [], []
        with torch.no_grad():
            for key, weight in self.weights.items():
                weight.copy_(tensors[f"weight/{key}"])
                self.optimizer.state[weight] = {
                    "step": torch.tensor(float(state["step"])),
                    "exp_avg": tensors[f"mean/{key}"],
                    "exp_avg_sq": tensors[f"square/{key}"],
                }
        say(f"going on from the checkpoint after step {state['step']:,} of {self.plan.steps:,}")
        return state["step"], state["tokens"], state["curve"], state["since"]


def _nats(model: PreTrainedModel, windows: np.ndarray) -> np.ndarray:
    """Loss of each token of each window but its first: (windows, window - 1) float64, nats."""
    import torch

    rows = []
    for window in windows:
        row = torch.tensor(window)[None]
        with torch.no_grad():
            logits = model(row, use_cache=False).logits[0, :-1]
        rows.append(torch.nn.functional.cross_entropy(logits.double(), row[0, 1:], reduction="none").numpy())
    return np.array(rows)


@contextmanager
def _repeatable(threads: int) -> Iterator[None]:
    """The same operations give the same bits inside the block, on so many threads."""
    import torch

    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1], warn_only=before[2])
        torch.utils.deterministic.fill_uninitialized_memory = before[3]


# ---------------------------------------------------------------- what is written


def _write(
    plan: TrainingSettings,
    out_folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    arms: Mapping[str, _ArmTokens],
    curve: Sequence[Mapping],
) -> dict:
    import torch
    import transformers

    from .head_kinds import head_kinds, nats_of_repeats
    from .loading import load_model, quiet_transformers
    from .preparation import whole_folder

    with whole_folder(out_folder, out_folder.name) as scratch:
        with quiet_transformers():
            model.to(torch.bfloat16).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _write_curve(scratch / LOSS, curve)
        # what a reader of the folder has: weights that were rounded to bfloat16
        read = load_model(scratch, dtype="float32")
        lead = [BOS_ID] * plan.adds_bos
        along = {arm: each.held_out[: plan.held_out["along"]].tolist() for arm, each in arms.items()}
        counted = CountModel([each.stream for each in arms.values()], len(tokenizer))
        count = parameters(read)
        record = {
            "label": label(plan.architecture, count),
            "settings": asdict(plan),
            "parameters": count,
            "steps": plan.steps,
            "tokens": plan.tokens,
            "vocabulary": len(tokenizer),
            "texts": {arm: each.facts for arm, each in arms.items()},
            "held_out": _held_out(lambda window: _nats(read, window[None])[0], tokenizer, arms),
            "baselines": {
                "unigram": _held_out(lambda window: counted.unigram(window[1:]), tokenizer, arms),
                "bigram": _held_out(lambda window: counted.bigram(window[:-1], window[1:]), tokenizer, arms),
            },
            "heads": head_kinds(read, [ids for each in along.values() for ids in each]),
            "repeats": {
                arm: nats_of_repeats(read, [ids[len(lead) :] for ids in each], lead) for arm, each in along.items()
            },
            "files": {path.name: provenance.file_sha256(path) for path in sorted(scratch.iterdir())},
            "provenance": provenance.record(
                asdict(plan), torch=torch.__version__, transformers=transformers.__version__
            ),
        }
        provenance.write_json(scratch / RECORD, record)
    return record


def label(architecture: str, count: int) -> str:
    """Name of a trained model in tables and figures: its architecture, never that of a released model."""
    return f"{ARCHITECTURES[architecture]} architecture, trained here, {count / 1e6:.1f} M parameters"


def _held_out(
    nats: Callable[[np.ndarray], np.ndarray], tokenizer: PreTrainedTokenizerFast, arms: Mapping[str, _ArmTokens]
) -> dict[str, dict[str, float]]:
    """Losses by arm: `nats` takes a window to the loss of each of its tokens but the first."""
    sizes = bytes_of_tokens(tokenizer)
    found = {}
    for arm, each in arms.items():
        total = math.fsum(float(nats(window).sum()) for window in each.held_out)
        mean = total / (each.held_out.shape[0] * (each.held_out.shape[1] - 1))
        text = int(sizes[each.held_out[:, 1:]].sum())
        found[arm] = {"nats": mean, "perplexity": math.exp(mean), "bits_per_byte": total / math.log(2) / text}
    return found


def _write_curve(path: Path, curve: Sequence[Mapping]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(curve[0])
    for row in curve:
        writer.writerow(
            ["" if value is None else f"{value:.8g}" if isinstance(value, float) else value for value in row.values()]
        )
    provenance.write_text(path, text.getvalue())


def _sayer(name: str) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(f"{name}: {line}", file=sys.stderr, flush=True)

    return say


# ---------------------------------------------------------------- checks


def _check_texts(plan: TrainingSettings, texts: Mapping[str, ArmText]) -> None:
    for arm in plan.arms:
        if arm not in texts:
            raise InvalidInput(
                f"arms.{arm}: there is no text of that arm; the texts are of {', '.join(texts) or 'none'}"
            )
        if not texts[arm].training:
            raise InvalidInput(f"arm {arm}: no document to train on")
        if len(texts[arm].held_out) < plan.held_out["windows"]:
            raise InvalidInput(
                f"held_out.windows: arm {arm} has {len(texts[arm].held_out)} held-out texts, "
                f"{plan.held_out['windows']} were asked for"
            )
    training = {text: arm for arm in plan.arms for text in texts[arm].training}
    for arm in plan.arms:
        for number, text in enumerate(texts[arm].held_out):
            if text in training:
                raise InvalidInput(f"arm {arm}: held-out text {number} is also a training document of {training[text]}")


def _check_size(plan: TrainingSettings) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        count = parameters(AutoModelForCausalLM.from_config(plan.config(plan.vocabulary)))
    if 2 * count > MOST_BYTES:
        raise InvalidInput(
            f"sizes, vocabulary: {count:,} parameters take {2 * count:,} bytes in bfloat16, at most {MOST_BYTES:,} "
            "are kept in a repository; make the model smaller"
        )


def _keys(name: str, value: object, wanted: Sequence[str] | None) -> None:
    """Stop unless `value` is a mapping with exactly these keys; None: with at least one."""
    if not isinstance(value, Mapping) or not value:
        raise InvalidInput(f"{name}: expected a mapping of keys, got {value!r}")
    if wanted is None:
        return
    prefix = "" if name == "settings" else f"{name}."
    for key in value:
        if key not in wanted:
            raise InvalidInput(f"{prefix}{key}: there is no such setting; expected {', '.join(wanted)}")
    for key in wanted:
        if key not in value:
            raise InvalidInput(f"{prefix}{key}: missing from the settings of the training")


def _whole(name: str, value: object, wanted: Sequence[str], least: int) -> None:
    _keys(name, value, wanted)
    for key in wanted:
        whole_number(f"{name}.{key}", value[key], least)


def _real(
    name: str,
    value: object,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    limits = {"of at least": least, "above": above, "of at most": most, "below": below}
    if (
        not number
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
        or (below is not None and value >= below)
    ):
        said = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        raise InvalidInput(f"{name}: expected a number {said}, got {value!r}")
