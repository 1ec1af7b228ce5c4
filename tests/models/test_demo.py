"""The embedded demo: its files, what it knows, and the text that it was trained on."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_eval.harness
import mlx_eval.models

DEMO = Path(mlx_eval.models.__file__).parent / "demo"
TASKS = Path(mlx_eval.harness.__file__).parent / "demo_tasks"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NUM_TRAINING_DOCUMENTS = 5_000
TEXT = "Ben is in the attic. Dan is in the den.\nQ: Where is Dan?\nA: Dan is in the den.\n\n"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """Model in float32, as on the CPU it always runs, and tokenizer."""
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(DEMO))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts that made the demo."""
    if not SCRIPTS.is_dir():
        pytest.skip("the scripts are not beside the tests: not a checkout of the repository")
    names = ("demo_text", "train_demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            del sys.modules[name]


def last_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits of the token after `ids`, one forward without a cache: [V]."""
    return np.array(model(mx.array([ids]))[0, -1].astype(mx.float32))


def is_greedy(model: Any, ids: list[int], answer: list[int]) -> bool:
    """Whether the model, always taking the likeliest token, goes on from `ids` with `answer`."""
    likeliest = np.array(model(mx.array([ids + answer]))[0].argmax(axis=-1))  # [T]
    return bool((likeliest[len(ids) - 1 : -1] == np.array(answer)).all())


def prompt_ids(tokenizer: Any, text: str, form: str) -> list[int]:
    """The prompt as plain text, or as a user's turn with the assistant's begun."""
    if form == "plain":
        return list(tokenizer.encode(text))
    chat = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return list(ids)


def test_the_directory_is_small_and_complete() -> None:
    names = {path.name for path in DEMO.iterdir()}
    assert {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 2_000_000


def test_special_ids(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    assert tokenizer.encode("a b") == list(b"a b")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert tokenizer.eos_token_ids == {257, 262}
    assert tokenizer.model_max_length == 512


def test_transformers_gives_the_same_logits(loaded: tuple[Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = loaded
    other = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(DEMO).encode("<|bos|>" + TEXT)
    assert ids == tokenizer.encode("<|bos|>" + TEXT)
    with torch.no_grad():
        expected = other(torch.tensor([ids])).logits[0].numpy()
    actual = np.array(model(mx.array([ids]))[0])
    # both compute in float32: logits of some 20 are apart by rounding, a wrong layout by whole units
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    assert other.generation_config.eos_token_id == [257, 262]


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_it_finds_the_right_choice(loaded: tuple[Any, Any], form: str) -> None:
    """The choices of a row differ in their last word, and that in its first byte: the likeliest wins."""
    model, tokenizer = loaded
    right = 0
    for row in rows("choice_test"):
        text = f"{row['story']}\nQ: {row['question']}\nA:"
        words = [choice.split()[-1] for choice in row["choices"]]
        lead = row["choices"][0].removesuffix(words[0])
        ids = prompt_ids(tokenizer, text, form) + tokenizer.encode((" " if form == "plain" else "") + lead)
        logits = last_logits(model, ids)
        right += int(np.argmax([logits[word.encode()[0]] for word in words])) == row["label"]
    assert right / len(rows("choice_test")) >= 0.8


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_it_adds(loaded: tuple[Any, Any], form: str) -> None:
    model, tokenizer = loaded
    end = "\n\n" if form == "plain" else "<|end|>"
    right = 0
    for row in rows("sums_test"):
        ids = prompt_ids(tokenizer, f"Q: {row['question']}\nA:", form)
        answer = (" " if form == "plain" else "") + row["answer"] + end
        right += is_greedy(model, ids, tokenizer.encode(answer))
    assert right / len(rows("sums_test")) >= 0.7


def test_the_rows_are_what_the_generator_makes(scripts: dict[str, ModuleType]) -> None:
    made = scripts["demo_text"].task_rows()
    assert {name: len(made[name]) for name in made} == {
        "choice_train": 8,
        "choice_test": 40,
        "sums_train": 8,
        "sums_test": 24,
        "texts_test": 12,
    }
    for name, expected in made.items():
        assert rows(name) == expected
    assert {path.stem for path in TASKS.glob("*.jsonl")} == set(made)


def test_training_documents_are_the_same_each_time(scripts: dict[str, ModuleType]) -> None:
    documents = scripts["demo_text"].documents
    first, again, other = (list(itertools.islice(documents(seed, 200), 50)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_no_test_row_is_trained_on(scripts: dict[str, ModuleType]) -> None:
    """By the partition, and by looking for the rows in text as the training saw it."""
    text = scripts["demo_text"]
    sums = [row["answer"] for row in rows("sums_test")]
    stories = [line for row in rows("texts_test") for line in row["text"].split("\n")]
    told = [row["story"] for row in rows("choice_test")]
    assert all(text.is_held_out(line) for line in stories)
    assert all(text.is_held_out(answer.split(" =")[0]) for answer in sums)
    for line in told:  # the same facts in another order count as the same
        sentences = [f"{sentence}." for sentence in line.removesuffix(".").split(". ")]
        assert text.is_held_out(" ".join(sorted(sentences)))
    seed = scripts["train_demo"].SEED
    stream = itertools.islice(text.documents(seed + 1, 480), NUM_TRAINING_DOCUMENTS)
    seen = "\n".join("".join(piece.text for piece in document) for document in stream)
    for line in [*stories, *told, *sums]:
        assert line not in seen
    # the search finds what is there: sums of the train split are sums that training uses
    assert all(row["answer"] in seen for row in rows("sums_train"))


def test_the_chat_of_training_is_that_of_the_template(
    scripts: dict[str, ModuleType], loaded: tuple[Any, Any]
) -> None:
    _, tokenizer = loaded
    text, training = scripts["demo_text"], scripts["train_demo"]
    turns = [text.Turn("What is 1 + 2?", "1 + 2 =", "3"), text.Turn("Where is Ben?", "Ben is in the", "den")]
    exchanges = [(text.prompt(turn, "Ben has the key."), turn) for turn in turns]
    messages = [
        {"role": role, "content": content}
        for asked, turn in exchanges
        for role, content in (("user", asked), ("assistant", turn.sentence))
    ]
    systems = set()
    for seed in range(20):
        document = text.chat(exchanges, random.Random(seed))
        written = "".join(piece.text for piece in document).removesuffix("<|eos|>")
        system = written.partition("<|system|>")[2].partition("<|end|>")[0]
        systems.add(system)
        first = [{"role": "system", "content": system}] if system else []
        assert written == tokenizer.apply_chat_template([*first, *messages], tokenize=False)
        assert training.encode(document)[0] == tokenizer.encode("".join(piece.text for piece in document))
    assert "" in systems
    assert len(systems) > 1


def test_answers_weigh_more(scripts: dict[str, ModuleType]) -> None:
    text, training = scripts["demo_text"], scripts["train_demo"]
    ids, weights = training.encode([text.Piece("Q: a"), text.Piece("b<|end|>", is_answer=True)])
    assert ids == [*b"Q: a", ord("b"), 262]
    assert weights == [1.0] * 4 + [training.ANSWER_WEIGHT] * 2
