"""What is loaded is what the folder holds; a folder that is not whole is refused by what it lacks."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from contourkv.errors import InvalidInput
from contourkv.models import load_encoder, load_model, load_tokenizer, prepare_model


@pytest.fixture
def folder(tmp_path):
    spec = {"source": "random", "architecture": "qwen3", "seed": 1, "licence": "none", "dtype": "bfloat16"}
    prepare_model("tiny", spec, tmp_path, tmp_path / "model", tmp_path / "lock")
    return tmp_path / "model"


def test_the_model_is_in_evaluation_mode_and_of_the_type_that_its_source_names(folder):
    model = load_model(folder)
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert load_model(folder, dtype="float32").dtype == torch.float32
    assert load_model(folder, dtype=torch.float16).dtype == torch.float16
    (folder / "source.json").unlink()
    assert load_model(folder).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("file", "said"), [("config.json", r"no config\.json"), ("model.safetensors", r"no \*\.safetensors")]
)
def test_a_missing_file_is_named(folder, file, said):
    (folder / file).unlink()
    with pytest.raises(InvalidInput, match=rf"{folder}: {said}"):
        load_model(folder)
    with pytest.raises(InvalidInput, match="there is no such model folder"):
        load_model(folder / "none")


def test_truncated_weights_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match="the weights cannot be read"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("model.norm.weight"), r"1 weights are missing, the first is model\.norm\.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(3)}), r"1 weights are mismatched"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(folder, change, said):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=said):
        load_model(folder)


def test_an_unsupported_architecture_is_refused_before_the_weights_are_read(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neox"}))
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(InvalidInput, match="architecture 'gpt_neox'"):
        load_model(folder)


def test_a_damaged_config_is_named(folder):
    (folder / "config.json").write_text('{"model_type": "qwen')
    with pytest.raises(InvalidInput, match=r"config\.json: is not readable as JSON"):
        load_model(folder)


def test_unknown_types_and_devices_are_refused(folder):
    with pytest.raises(InvalidInput, match="dtype: expected one of float32, bfloat16, float16, got 'int4'"):
        load_model(folder, dtype="int4")
    with pytest.raises(InvalidInput, match="device: 'abacus' is none that torch knows"):
        load_model(folder, device="abacus")
    with pytest.raises(InvalidInput, match=r"device: cuda:99 was asked for, torch sees \d+ CUDA devices"):
        load_model(folder, device="cuda:99")


def test_code_in_a_folder_is_never_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert type(load_model(folder)).__name__ == "Qwen3ForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: is not readable"):
        load_tokenizer(folder)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: is not a tokenizer"):
        load_encoder(folder)
    (folder / "tokenizer.json").unlink()
    for load in (load_tokenizer, load_encoder):
        with pytest.raises(InvalidInput, match=r"no tokenizer\.json in the model folder"):
            load(folder)
