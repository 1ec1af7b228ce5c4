#!/usr/bin/env python3
"""Make up the text of the embedded demo: small stories, questions about them, and sums.

    python scripts/demo_text.py            # show a few training documents
    python scripts/demo_text.py --write    # write the rows of the demo tasks

Everything comes from a seed. Each story, set of facts and sum belongs to one of two sides, decided by a
hash of its own text: training documents use one side only, test rows of the tasks the other side only.
Knows the chat format as text; knows no model and no arrays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

TASKS = Path(__file__).resolve().parent.parent / "mlx_eval" / "harness" / "demo_tasks"
HELD_OUT_SHARE = 8
"""One in so many stories, sets of facts and sums is kept for the tasks."""
TASK_SEED = 2024
NUM_ROWS = {"choice": 40, "texts": 12, "sums": 24}
NUM_EXAMPLES = 8
"""Rows of a task's train split, from which few-shot examples are drawn."""

# Within a list no two words begin with the same letter: the first byte of an answer decides it.
NAMES = ("Anna", "Ben", "Cleo", "Dan", "Ella", "Finn", "Gus", "Hana", "Ivo", "Mia")
OBJECTS = ("apple", "ball", "cup", "drum", "fork", "hat", "key", "lamp", "map", "shoe")
PLACES = ("attic", "barn", "cellar", "den", "garden", "hall", "kitchen", "lodge", "mill", "shed")
ANIMALS = ("bear", "cat", "dog", "fox", "goat", "hen", "owl", "pig")
COLOURS = ("red", "blue", "green", "white", "black")
FOODS = ("bread", "soup", "plums", "nuts")
WEATHER = ("sunny", "cold", "rainy", "windy")
MOODS = ("happy", "tired", "glad")
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer in one word.", "Read the story.", "Be brief.")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a training document."""

    text: str
    """May spell special tokens, such as `<|user|>`."""
    is_answer: bool = False
    """Whether the text can be worked out from what stands before it."""


Document = list[Piece]


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its answer and the other words that could be taken for the answer."""

    text: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A few sentences, and every question that they answer."""

    text: str
    questions: tuple[Question, ...]


def is_held_out(key: str) -> bool:
    """Which side of the partition a text is on: True for the tasks, False for training."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_SHARE == 0


def on_side(held_out: bool, make: Callable[[], T], key: Callable[[T], str]) -> T:
    """Call `make` until what it gives is on the wanted side of the partition."""
    while True:
        item = make()
        if is_held_out(key(item)) == held_out:
            return item


# ── what there is to tell and to ask ────────────────────────────────────────────────────────────────


def facts(rng: random.Random, num_facts: int, *, held_out: bool) -> Facts:
    """So many sentences, each about another person, object and place."""
    return on_side(held_out, lambda: _any_facts(rng, num_facts), lambda item: item.text)


def _any_facts(rng: random.Random, num_facts: int) -> Facts:
    names, objects, places = (tuple(rng.sample(words, num_facts)) for words in (NAMES, OBJECTS, PLACES))
    sentences: list[str] = []
    questions: list[Question] = []
    for name, thing, place in zip(names, objects, places, strict=True):
        verb = rng.choice(("kept", "left", "hid"))
        sentences.append(f"{name} {verb} the {thing} in the {place}.")
        questions.append(Question(f"Where is the {thing}?", place, places))
        questions.append(Question(f"Who {verb} the {thing}?", name, names))
    return Facts(" ".join(sentences), tuple(questions))


def sum_question(rng: random.Random, *, held_out: bool) -> Question:
    """A number below 40 and a digit, in either order. A pair is held out in both orders."""
    first, second = on_side(
        held_out,
        lambda: (rng.randrange(40), rng.randrange(10)),
        lambda pair: "{} + {}".format(*sorted(pair)),
    )
    total = first + second
    if rng.random() < 0.5:
        first, second = second, first
    return Question(f"What is {first} + {second}?", str(total))


def story(rng: random.Random, *, held_out: bool) -> str:
    """A story of three to ten sentences."""
    return on_side(held_out, lambda: _any_story(rng), lambda text: text)


def stories(rng: random.Random, count: int, *, held_out: bool) -> str:
    """So many stories, a line each."""
    return "\n".join(story(rng, held_out=held_out) for _ in range(count))


def _any_story(rng: random.Random) -> str:
    (one, two), (animal, other) = rng.sample(NAMES, 2), rng.sample(ANIMALS, 2)
    place, place_2 = rng.sample(PLACES, 2)
    thing, colour, food = rng.choice(OBJECTS), rng.choice(COLOURS), rng.choice(FOODS)
    opening = rng.choice(
        (f"One day {one} the {animal} went to the {place}.", f"{one} the {animal} was in the {place}.")
    )
    meeting = rng.choice(
        (f"Then {two} the {other} came by.", f"Soon {one} met {two} the {other}.", f"{two} was there, too.")
    )
    optional = [
        f"It was a {rng.choice(WEATHER)} day.",
        f'"Is this your {thing}?" said {one}.',
        f'"Yes, it is my {thing}," said {two}.',
        f"{one} gave the {thing} to {two}.",
        f"{two} put the {thing} in the {place_2}.",
        f"They went to the {place_2} and ate {food}.",
        f"In the evening {one} and {two} were {rng.choice(MOODS)}.",
    ]
    kept = [sentence for sentence in optional if rng.random() < 0.6]
    start = kept[:1] if kept and kept[0].startswith("It was") else []
    found = f"There {one} found a {colour} {thing}."
    return " ".join([opening, *start, found, meeting, *kept[len(start) :]])


# ── how it is written down ──────────────────────────────────────────────────────────────────────────


def prompt(question: str, text: str = "") -> str:
    """What comes before the answer in the plain form. The tasks write it the same way."""
    return f"{text}\nQ: {question}\nA:" if text else f"Q: {question}\nA:"


def plain(turns: list[tuple[str, str]], rng: random.Random) -> Document:
    """Prompts and answers one after the other, an empty line behind each."""
    pieces = [Piece("<|bos|>" if rng.random() < 0.5 else "")]
    for asked, answer in turns:
        pieces += [Piece(f"{asked} "), Piece(f"{answer}\n\n", is_answer=True)]
    return [*pieces, Piece("<|eos|>")]


def chat(turns: list[tuple[str, str]], rng: random.Random) -> Document:
    """The same as a conversation. `CHAT_TEMPLATE` in train_demo.py writes the same text."""
    system = f"<|system|>{rng.choice(SYSTEM_MESSAGES)}<|end|>" if rng.random() < 0.3 else ""
    pieces = [Piece(f"<|bos|>{system}")]
    for asked, answer in turns:
        pieces += [Piece(f"<|user|>{asked}<|end|><|assistant|>"), Piece(f"{answer}<|end|>", is_answer=True)]
    return pieces if rng.random() < 0.9 else [*pieces, Piece("<|eos|>")]


def in_one_turn(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """All but the last answer moved into the question, the way harnesses write few-shot prompts."""
    before = "".join(f"{asked} {answer}\n\n" for asked, answer in turns[:-1])
    return [(before + turns[-1][0], turns[-1][1])]


def document(rng: random.Random, max_bytes: int) -> Document:
    """One training document of about `max_bytes` at most; stories may be longer."""
    kind = rng.random()
    if kind < 0.2:
        text = stories(rng, 1 + int(rng.random() < 0.4) * max_bytes // 200, held_out=False)
        return [Piece("<|bos|>" if rng.random() < 0.7 else ""), Piece(text), Piece("\n<|eos|>")]
    turns: list[tuple[str, str]] = []
    ask = prompt if rng.random() < 0.8 else _bare
    length = 0
    for _ in range(rng.randint(3, 12)):
        new = _sums(rng, ask) if kind < 0.45 else _facts_turns(rng, ask)
        length += sum(len(asked) + len(answer) + 3 for asked, answer in new)
        if turns and length > max_bytes:
            break
        turns += new
    if rng.random() < 0.5 and ask is prompt:
        return plain(turns, rng)
    if ask is prompt and len(turns) > 1 and rng.random() < 0.15:
        turns = in_one_turn(turns)
    return chat(turns, rng)


def documents(seed: int, max_bytes: int) -> Iterator[Document]:
    """Training documents without end."""
    rng = random.Random(seed)
    while True:
        yield document(rng, max_bytes)


def _bare(question: str, text: str = "") -> str:
    """How a person would ask in a chat."""
    return f"{text} {question}" if text else question


def _sums(rng: random.Random, ask: Callable[..., str]) -> list[tuple[str, str]]:
    question = sum_question(rng, held_out=False)
    return [(ask(question.text), question.answer)]


def _facts_turns(rng: random.Random, ask: Callable[..., str]) -> list[tuple[str, str]]:
    told = facts(rng, rng.choice((1, 2, 2, 3, 3, 4, 4, 4)), held_out=False)
    count = min(len(told.questions), rng.choice((1, 2, 3, 4)))
    asked = rng.sample(told.questions, count)
    return [(ask(item.text, told.text if not index else ""), item.answer) for index, item in enumerate(asked)]


# ── the rows of the tasks ───────────────────────────────────────────────────────────────────────────


def task_rows() -> dict[str, list[dict[str, Any]]]:
    """Rows of every data file of the demo tasks, by the file's name without its ending."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for split, held_out in (("train", False), ("test", True)):
        rng = random.Random(f"{TASK_SEED} {split}")
        for kind, num_rows in NUM_ROWS.items():
            count = num_rows if held_out else NUM_EXAMPLES
            if kind == "texts" and not held_out:
                continue  # perplexity has no few-shot form
            unique: dict[str, dict[str, Any]] = {}
            while len(unique) < count:
                row = _row(kind, len(unique), rng, held_out=held_out)
                unique.setdefault(json.dumps(row), row)
            rows[f"{kind}_{split}"] = list(unique.values())
    return rows


def _row(kind: str, index: int, rng: random.Random, *, held_out: bool) -> dict[str, Any]:
    if kind == "choice":
        told = facts(rng, 4, held_out=held_out)
        question = rng.choice(told.questions)
        choices = rng.sample(question.choices, len(question.choices))
        label = choices.index(question.answer)
        return {"story": told.text, "question": question.text, "choices": choices, "label": label}
    if kind == "sums":
        question = sum_question(rng, held_out=held_out)
        return {"question": question.text, "answer": question.answer}
    # every third text is longer than the model's window
    return {"text": stories(rng, 4 if index % 3 == 2 else 1, held_out=held_out)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make up the text of the embedded demo.")
    parser.add_argument("--write", action="store_true", help=f"write the rows of the tasks to {TASKS.name}/")
    if parser.parse_args().write:
        for name, rows in task_rows().items():
            (TASKS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            print(f"{name}.jsonl: {len(rows)} rows")
        return
    stream = documents(seed=0, max_bytes=250)
    for _ in range(8):
        print("".join(piece.text for piece in next(stream)), end="\n────\n")


if __name__ == "__main__":
    main()
