"""Captured rows are the model's own attention, cost O(rows * N), and leave the model as it was."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EAGER, SPECIAL, VOCABULARY, WINDOW, WINDOWS, build, ids_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contourkv.capture import capture_rows
from contourkv.capture import recording as module
from contourkv.capture.recording import EAGER_BLOCK, Recorder, recording
from contourkv.errors import ContourKVError, InvalidInput, InvariantBroken
from contourkv.models.geometry import attention_geometry

LENGTH = 64
IDS = ids_of(LENGTH)
POSITIONS = [0, 9, 40, 63]
MODEL = build("qwen2")  # a full and a sliding layer
EVERY_ROW = capture_rows(MODEL, IDS, range(LENGTH))


def plain_output(model, ids, implementation=None):
    """Logits of the model by transformers alone."""
    if implementation:
        model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits


# Properties


@settings(max_examples=15)
@given(st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=6, unique=True))
def test_rows_do_not_depend_on_which_others_are_captured(positions):
    for alone, together in zip(capture_rows(MODEL, IDS, positions), EVERY_ROW, strict=True):
        assert alone.positions.tolist() == positions
        np.testing.assert_allclose(alone.p, together.p[positions], atol=1e-6)
        np.testing.assert_array_equal(alone.v, together.v)


@settings(max_examples=10)
@given(st.integers(1, LENGTH))
def test_rows_do_not_depend_on_later_tokens(length):
    rows = capture_rows(MODEL, IDS[:length], [length - 1])
    for short, long in zip(rows, EVERY_ROW, strict=True):
        np.testing.assert_allclose(short.p[0], long.p[length - 1, :, :length], atol=1e-5)
        np.testing.assert_allclose(short.v, long.v[:, :length], atol=1e-5)


@pytest.mark.parametrize("architecture", SPECIAL)
def test_a_row_is_a_distribution_over_its_visible_keys(architecture):
    for rows in capture_rows(build(architecture), IDS, POSITIONS):
        assert rows.p.dtype == np.float64 and rows.v.dtype == np.float32
        for row, position in enumerate(POSITIONS):
            keys = rows.visible(row)
            first = 0 if rows.window is None else max(0, position - rows.window + 1)
            assert (keys.start, keys.stop) == (first, position + 1)
            hidden = np.ones(LENGTH, bool)
            hidden[keys] = False
            assert (rows.p[row][:, hidden] == 0).all()
            assert (rows.p[row][:, keys] > 0).all()
        sums = rows.p.sum(-1) + (0 if rows.sink is None else rows.sink)
        np.testing.assert_allclose(sums, 1, atol=1e-12)


# The oracle: transformers' own eager attention


@pytest.mark.parametrize("architecture", SPECIAL)
def test_rows_are_the_weights_of_eager_attention(architecture):
    model = build(architecture)
    captured = capture_rows(model, IDS, POSITIONS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([IDS]), use_cache=False, output_attentions=True).attentions
    assert [rows.window for rows in captured] == WINDOWS.get(architecture, [None, None])
    for rows, theirs in zip(captured, weights, strict=True):
        np.testing.assert_allclose(rows.p, theirs[0][:, POSITIONS].transpose(0, 1).numpy(), atol=1e-5)
        # sharp enough that a wrong mask, scale or head order would show
        assert 0.1 < rows.p[1:].max(-1).mean() < 0.95
        assert (rows.sink is not None) == (architecture == "gpt_oss")


@pytest.mark.parametrize("architecture", SPECIAL)
def test_values_are_what_the_projection_gave(architecture):
    model, given = build(architecture), []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: given.append(output[0]))
        for layer in model.model.layers
    ]
    captured = capture_rows(model, IDS, POSITIONS)
    for hook in hooks:
        hook.remove()
    for rows, projected in zip(captured, given, strict=True):
        split = projected.view(LENGTH, rows.kv_heads, -1).transpose(0, 1)
        np.testing.assert_array_equal(rows.v, split.numpy())
        assert rows.heads == 4 and rows.kv_heads == 2 and rows.group == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", SPECIAL)
def test_weights_times_values_give_the_models_attention_output(architecture, dtype):
    model, outputs = build(architecture, dtype), []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0]))
        for layer in model.model.layers
    ]
    captured = capture_rows(model, IDS, POSITIONS)
    for hook in hooks:
        hook.remove()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for rows, output in zip(captured, outputs, strict=True):
        theirs = output[POSITIONS].double().view(len(POSITIONS), rows.heads, -1).numpy()
        ours = np.einsum("rhn,hnd->rhd", rows.p, np.repeat(rows.v, rows.group, axis=0).astype(float))
        relative = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(theirs, axis=-1)
        assert relative.max() <= limit
        assert rows.max_relative_error == pytest.approx(relative.max(), rel=1e-6)


@pytest.mark.parametrize("architecture", SPECIAL)
def test_the_models_output_is_unchanged(architecture):
    model = build(architecture)
    before = model.config._attn_implementation
    recorder = Recorder(attention_geometry(model.config), LENGTH, POSITIONS, "tiny")
    with recording(model, recorder):
        recorded = plain_output(model, IDS)
    assert len(recorder.layers()) == 2
    assert model.config._attn_implementation == before
    assert torch.equal(recorded, plain_output(model, IDS, "eager" if architecture in EAGER else "sdpa"))


@pytest.mark.parametrize("architecture", EAGER)
def test_eager_attention_in_blocks_is_eager_attention(architecture):
    model, ids = build(architecture), ids_of(2 * EAGER_BLOCK + 7)
    recorder = Recorder(attention_geometry(model.config), len(ids), [len(ids) - 1], "tiny")
    with recording(model, recorder):
        recorded = plain_output(model, ids)
    torch.testing.assert_close(recorded, plain_output(model, ids, "eager"))


def test_one_token():
    for rows in capture_rows(build("llama"), [5], [0]):
        np.testing.assert_array_equal(rows.p, np.ones((1, 4, 1)))


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", SPECIAL)
def test_every_device_gives_the_rows_of_the_cpu(architecture, device):
    model = build(architecture)
    here = capture_rows(model, IDS, POSITIONS)
    for ours, theirs in zip(here, capture_rows(model.to(device), IDS, POSITIONS), strict=True):
        np.testing.assert_allclose(ours.p, theirs.p, atol=1e-4)


# Memory


class LargestTensor(TorchDispatchMode):
    """The most numbers in one tensor that any operator returned."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return result


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gemma2", "gpt_oss"])
def test_no_tensor_grows_with_heads_times_length_squared(architecture):
    length, heads = 2048, 16
    model = build(architecture, num_attention_heads=heads, num_hidden_layers=2, head_dim=4)
    with LargestTensor() as largest:
        capture_rows(model, ids_of(length), [length - 1, 1000, 17])
    # One mask of N x N for all heads is transformers' own; scores would be heads * N * N.
    assert largest.numbers <= heads * length**2 / 8


# Nothing is left behind


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_an_exception_leaves_the_model_as_it_was(architecture):
    model = build(architecture)
    before, logits = model.config._attn_implementation, plain_output(model, IDS)

    def fail(layer):
        raise RuntimeError(f"stop in layer {layer}")

    with pytest.raises(RuntimeError, match="stop in layer 0"):
        capture_rows(model, IDS, POSITIONS, on_layer=fail)
    assert model.config._attn_implementation == before
    assert module._recorder.get() is None
    assert torch.equal(plain_output(model, IDS), logits)
    assert len(capture_rows(model, IDS, POSITIONS)) == 2


def test_layers_are_reported_as_they_come():
    seen = []
    capture_rows(build("llama"), IDS, POSITIONS, on_layer=seen.append)
    assert seen == [0, 1]


def test_a_model_is_recorded_by_one_call_at_a_time():
    model = build("llama")
    recorder = Recorder(attention_geometry(model.config), LENGTH, POSITIONS, "tiny")
    with recording(model, recorder), pytest.raises(ContourKVError, match=r"tiny.*recorded already"):
        with recording(model, recorder):
            pass
    assert model.config._attn_implementation == "sdpa"


def test_another_threads_forward_pass_is_not_recorded():
    model, other = build("llama"), []
    expected = plain_output(model, IDS[:10])
    recorder = Recorder(attention_geometry(model.config), LENGTH, POSITIONS, "tiny")
    with recording(model, recorder):
        thread = threading.Thread(target=lambda: other.append(plain_output(model, IDS[:10])))
        thread.start()
        thread.join()
    assert torch.equal(other[0], expected)
    with pytest.raises(ContourKVError, match=r"layers \[0, 1\]"):
        recorder.layers()


def test_captured_values_do_not_change_with_the_model():
    model = build("llama")
    rows = capture_rows(model, IDS, POSITIONS)[0]
    before = rows.v.copy()
    capture_rows(model, ids_of(LENGTH, seed=8), POSITIONS)
    np.testing.assert_array_equal(rows.v, before)


# Bad input


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        ([], [0], "context is empty"),
        (IDS, [], "at least one query position"),
        (IDS, [3, 64], "64 lies outside the context of 64 tokens, expected 0..63"),
        (IDS, [-1], "-1 lies outside"),
        (IDS, [5, 9, 5], "5 is named twice"),
        (IDS * 65, [0], "4160 tokens, the window of model llama holds 4096"),
        ([1, VOCABULARY], [0], f"token {VOCABULARY} is not in the vocabulary of model llama"),
    ],
)
def test_bad_input_is_refused_before_any_compute(ids, positions, message):
    model = build("llama")
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(InvalidInput, match=message):
        capture_rows(model, ids, positions)


def test_an_unknown_architecture_is_refused_by_name_before_any_compute():
    model = build("mistral")
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(InvalidInput, match=r"'mistral'.*supported are gemma2, gemma3_text.*llama.*qwen3"):
        capture_rows(model, IDS, POSITIONS)


def test_random_dropout_of_weights_is_refused():
    model = build("llama", attention_dropout=0.5).train()
    with pytest.raises(InvalidInput, match=r"model\.eval\(\)"):
        capture_rows(model, IDS, POSITIONS)


def test_values_that_are_not_finite_are_named():
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[model.config.head_dim] = torch.nan  # KV head 1
    with pytest.raises(InvariantBroken, match=r"tiny, layer 1, head 2 \(KV head 1\).*key 0.*position 0"):
        capture_rows(model, IDS, POSITIONS, name="tiny")


def test_weights_that_are_not_finite_are_named():
    model = build("llama")

    def poke(_, __, output):
        output[0, 40, 3 * model.config.head_dim] = torch.nan  # query head 3 at position 40
        return output

    model.model.layers[0].self_attn.q_proj.register_forward_hook(poke)
    with pytest.raises(InvariantBroken, match=r"tiny, layer 0, head 3.*row of position 40"):
        capture_rows(model, IDS, POSITIONS, name="tiny")


def test_an_output_that_the_rows_do_not_give_is_named(monkeypatch):
    model = build("llama")
    attend = module.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def other(layer, *args, **kwargs):
        output, weights = attend(layer, *args, **kwargs)
        output[0, 40, 2] *= 1.01 if layer.layer_idx == 1 else 1
        return output, weights

    monkeypatch.setitem(module.ALL_ATTENTION_FUNCTIONS, "sdpa", other)
    with pytest.raises(InvariantBroken, match=r"tiny, layer 1, head 2, position 40.*0\.0099.*float32 is 0\.001"):
        capture_rows(model, IDS, POSITIONS, name="tiny")


def test_a_config_that_disagrees_with_the_forward_pass_is_named():
    model = build("llama")
    geometry = attention_geometry({**model.config.to_dict(), "num_key_value_heads": 4})
    recorder = Recorder(geometry, LENGTH, POSITIONS, "tiny")
    with recording(model, recorder), pytest.raises(ContourKVError, match="layer 0: expected queries"):
        plain_output(model, IDS)


def test_a_wrong_window_is_found_by_the_check():
    model = build("qwen2")
    geometry = attention_geometry({**model.config.to_dict(), "sliding_window": WINDOW - 1})
    recorder = Recorder(geometry, LENGTH, POSITIONS, "tiny")
    with recording(model, recorder), pytest.raises(InvariantBroken, match="tiny, layer 1"):
        plain_output(model, IDS)
