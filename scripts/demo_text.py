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
HELD_OUT_SHARE = 6
"""One in so many stories, sets of facts and sums is kept for the tasks."""
TASK_SEED = 2024
NUM_ROWS = {"choice": 40, "texts": 12, "sums": 24}
NUM_CHOICES = 4
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
class Turn:
    """What is asked, and the answer: words that repeat the question, then the one that is asked for."""

    asked: str
    lead: str
    answer: str

    @property
    def sentence(self) -> str:
        """The whole answer."""
        return f"{self.lead} {self.answer}."


@dataclass(frozen=True, slots=True)
class Facts:
    """A few sentences of one kind, and the question that each answers."""

    turns: tuple[Turn, ...]
    untold: tuple[str, ...]
    """Places or things that could have been told and were not."""

    @property
    def text(self) -> str:
        """The sentences."""
        return " ".join(turn.sentence for turn in self.turns)

    @property
    def key(self) -> str:
        """The sentences in the order of the alphabet: told in another order they are the same facts."""
        return " ".join(sorted(turn.sentence for turn in self.turns))


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
    """So many sentences, each about another person and another place or thing."""
    return on_side(held_out, lambda: _any_facts(rng, num_facts), lambda item: item.key)


def _any_facts(rng: random.Random, num_facts: int) -> Facts:
    question, lead, words = rng.choice(
        (("Where is {}?", "{} is in the", PLACES), ("What does {} have?", "{} has the", OBJECTS))
    )
    names, told = rng.sample(NAMES, num_facts), rng.sample(words, num_facts)
    turns = [
        Turn(question.format(name), lead.format(name), word) for name, word in zip(names, told, strict=True)
    ]
    return Facts(tuple(turns), untold=tuple(word for word in words if word not in told))


def sum_turn(rng: random.Random, *, held_out: bool) -> Turn:
    """A number from 10 to 49 plus one from 1 to 5."""
    left = on_side(held_out, lambda: f"{rng.randrange(10, 50)} + {rng.randrange(1, 6)}", str)
    first, second = left.split(" + ")
    return Turn(f"What is {left}?", f"{left} =", str(int(first) + int(second)))


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


def prompt(turn: Turn, text: str = "") -> str:
    """What comes before the answer in the plain form. The tasks write it the same way."""
    return f"{text}\nQ: {turn.asked}\nA:" if text else f"Q: {turn.asked}\nA:"


Exchange = tuple[str, Turn]
"""A prompt and the turn whose answer follows it."""


def plain(exchanges: list[Exchange], rng: random.Random) -> Document:
    """Prompts and answers one after the other, an empty line behind each."""
    pieces = [Piece("<|bos|>" if rng.random() < 0.5 else "")]
    for asked, turn in exchanges:
        pieces += [Piece(f"{asked} {turn.lead} "), Piece(turn.answer, is_answer=True), Piece(".\n\n")]
    return [*pieces, Piece("<|eos|>")]


def chat(exchanges: list[Exchange], rng: random.Random) -> Document:
    """The same as a conversation. `CHAT_TEMPLATE` in train_demo.py writes the same text."""
    system = f"<|system|>{rng.choice(SYSTEM_MESSAGES)}<|end|>" if rng.random() < 0.3 else ""
    pieces = [Piece(f"<|bos|>{system}")]
    for asked, turn in exchanges:
        pieces += [Piece(f"<|user|>{asked}<|end|><|assistant|>{turn.lead} ")]
        pieces += [Piece(turn.answer, is_answer=True), Piece(".<|end|>")]
    return pieces if rng.random() < 0.9 else [*pieces, Piece("<|eos|>")]


def in_one_turn(exchanges: list[Exchange]) -> list[Exchange]:
    """All but the last answer moved into the question, the way harnesses write few-shot prompts."""
    before = "".join(f"{asked} {turn.sentence}\n\n" for asked, turn in exchanges[:-1])
    return [(before + exchanges[-1][0], exchanges[-1][1])]


def repeated(turns: list[Turn], told: str, rng: random.Random) -> Document:
    """Sentences without questions: what was told, then the turns' sentences, a line."""
    pieces = [Piece("<|bos|>" if rng.random() < 0.5 else ""), Piece(f"{told}\n" if told else "")]
    for turn in turns:
        pieces += [Piece(f"{turn.lead} "), Piece(turn.answer, is_answer=True), Piece(". ")]
    return [*pieces, Piece("\n<|eos|>")]


def document(rng: random.Random, max_bytes: int) -> Document:
    """One training document of about `max_bytes` at most; stories may be longer."""
    kind = rng.random()
    if kind < 0.12:
        text = stories(rng, 1 + int(rng.random() < 0.4) * max_bytes // 200, held_out=False)
        return [Piece("<|bos|>" if rng.random() < 0.7 else ""), Piece(text), Piece("\n<|eos|>")]
    is_sums = kind < 0.4
    if rng.random() < 0.35:
        if is_sums:
            return repeated([sum_turn(rng, held_out=False) for _ in range(max_bytes // 20)], "", rng)
        told = facts(rng, rng.randint(1, 4), held_out=False)
        return repeated(rng.sample(told.turns, len(told.turns)), told.text, rng)
    exchanges: list[Exchange] = []
    ask = prompt if rng.random() < 0.8 else _bare
    length = 0
    for _ in range(12):
        new = _sums(rng, ask) if is_sums else _questions(rng, ask)
        length += sum(len(asked) + len(turn.sentence) + 3 for asked, turn in new)
        if exchanges and length > max_bytes:
            break
        exchanges += new
    if rng.random() < 0.5 and ask is prompt:
        return plain(exchanges, rng)
    if ask is prompt and len(exchanges) > 1 and rng.random() < 0.15:
        exchanges = in_one_turn(exchanges)
    return chat(exchanges, rng)


def documents(seed: int, max_bytes: int) -> Iterator[Document]:
    """Training documents without end."""
    rng = random.Random(seed)
    while True:
        yield document(rng, max_bytes)


def _bare(turn: Turn, text: str = "") -> str:
    """How a person would ask in a chat."""
    return f"{text} {turn.asked}" if text else turn.asked


def _sums(rng: random.Random, ask: Callable[..., str]) -> list[Exchange]:
    turn = sum_turn(rng, held_out=False)
    return [(ask(turn), turn)]


def _questions(rng: random.Random, ask: Callable[..., str]) -> list[Exchange]:
    """Facts and one to three questions about them."""
    told = facts(rng, rng.choice((1, 2, 2, 3, 3, 4, 4, 4)), held_out=False)
    asked = rng.sample(told.turns, min(len(told.turns), rng.choice((1, 2, 3))))
    return [(ask(turn, "" if index else told.text), turn) for index, turn in enumerate(asked)]


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
        turn = rng.choice(told.turns)
        words = [turn.answer, *rng.sample(told.untold, NUM_CHOICES - 1)]
        rng.shuffle(words)
        return {
            "story": told.text,
            "question": turn.asked,
            "choices": [f"{turn.lead} {word}." for word in words],
            "label": words.index(turn.answer),
        }
    if kind == "sums":
        turn = sum_turn(rng, held_out=held_out)
        return {"question": turn.asked, "answer": turn.sentence}
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
