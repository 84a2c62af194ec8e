"""Tokenizers and wheels of small texts that the tests of the benchmark's tasks share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from wheel_files import make_wheel

from contourkv.benchmark.tasks.catalogue import QUESTIONS
from contourkv.benchmark.tasks.words import ADJECTIVES, NOUNS
from contourkv.models.random_source import byte_tokenizer

PROSE, DIALOGUE = "speeches==1.0", "chats==1.0"
TEXTS = {"prose": {"wheel": PROSE, "reader": "sotu"}, "dialogue": {"wheel": DIALOGUE, "reader": "chitchat"}}
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
WORDS = "council met in the old library at noon and the café voted on seven bridges before lunch".split()
WINDOW = 1 << 17


def sentences(seed: int, characters: int) -> str:
    """Paragraphs of sentences, no two windows alike."""
    rng = np.random.default_rng(seed)
    text = ""
    while len(text) < characters:
        sentence = " ".join(rng.choice(WORDS, rng.integers(4, 11)))
        text += f"{sentence.capitalize()} {rng.integers(100, 1000)}. " + ("\n\n" if rng.random() < 0.1 else "")
    return text


def make_models(folder: Path) -> dict[str, Path]:
    """Tokenizers in model folders: bytes, with and without BOS; bytes with a chat template; pieces of words."""
    made = {}
    for name, bos in {"bytes": False, "bos": True, "chat": True}.items():
        made[name] = _folder(folder / name)
        tokenizer = byte_tokenizer(bos)
        if name == "chat":
            tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(made[name])
    pieces = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    pieces.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    pieces.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<e>"], show_progress=False
    )
    pieces.train_from_iterator(
        [sentences(5, 30_000), Path(__file__).read_text(encoding="utf-8"), " ".join(NOUNS + ADJECTIVES)], trainer
    )
    # a tokenizer that adds a token at the end, as some do
    end = pieces.token_to_id("<e>")
    pieces.post_processor = processors.TemplateProcessing(single="$A <e>", special_tokens=[("<e>", end)])
    made["pieces"] = _folder(folder / "pieces")
    PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(made["pieces"])
    return made


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    config = {"model_type": "llama", "max_position_embeddings": WINDOW}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def make_texts(folder: Path) -> dict[str, str]:
    """Wheels of prose, dialogue and questions in `folder`; their SHA-256 by requirement."""
    speeches = {f"pkg/speeches/{year}.txt": sentences(year, 40_000) for year in range(4)}
    turns = [
        [{"text": f"day {turn} {sentences(turn, 60)}", "sender": "ab"[turn % 2], "timestamp": "0"}]
        for turn in range(300)
    ]
    chats = {"chats/dataset.json": json.dumps({"one": {"messages": turns}})}
    questions = {
        "data/json/squad.json": json.dumps({"version": "v2.0", "data": [article(number) for number in range(4)]}),
        "data/json/hotpotqa.json": json.dumps([linked(number) for number in range(12)]),
    }
    return {
        PROSE: make_wheel(folder, PROSE, speeches),
        DIALOGUE: make_wheel(folder, DIALOGUE, chats),
        QUESTIONS: make_wheel(folder, QUESTIONS, questions),
    }


def article(number: int) -> dict:
    """A SQuAD article of eight paragraphs with three questions each, one of them without an answer."""
    paragraphs = []
    for place in range(8):
        code, town = f"A{number}P{place}", f"Town{number}{place}"
        text = (
            f"{town} lies by the river. Its code is {code} since 19{number}{place}. {sentences(90 + place, 60)}".strip()
        )
        asked = [
            {
                "question": f"What is the code of {town}?",
                "is_impossible": False,
                "answers": [{"text": code, "answer_start": text.index(code)}] * 2,
            },
            {
                "question": f"Since when has {code} been valid?",
                "is_impossible": False,
                "answers": [
                    {"text": f"19{number}{place}", "answer_start": text.index(f"19{number}{place}")},
                    {"text": f"since 19{number}{place}", "answer_start": text.index("since")},
                ],
            },
            {"question": f"Who founded {town}?", "is_impossible": True, "answers": []},
        ]
        paragraphs.append({"context": text, "qas": asked})
    return {"title": f"Article {number}", "paragraphs": paragraphs}


def linked(number: int) -> dict:
    """A HotpotQA question over two of ten paragraphs; the first of all is answered by yes."""
    context = [[f"Title {number}-{place}", ["First one.", f" Fact {number}-{place}."]] for place in range(10)]
    facts = [[f"Title {number}-3", 1], [f"Title {number}-7", 0], [f"Title {number}-7", 9]]
    answer = "yes" if number == 0 else f"{number}-3"
    return {"question": f"Which fact is {number}?", "answer": answer, "supporting_facts": facts, "context": context}
