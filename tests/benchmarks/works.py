"""A made-up work for the tests of the benchmarks."""

from __future__ import annotations

from benchmarks.side_by_side.works import Work

QUESTIONS = ("what is the answer?", "the quick brown fox", "jumps over the lazy dog.", "Question: 42?")
CHOICES = (" the answer", " 42", " fox", " lazy dog")
HEADER = "The answer is 42. Question: what is the quick brown fox? Answer: the lazy dog. "

WORK = Work(
    name="made-up",
    kind="loglikelihood",
    texts=tuple((HEADER + question, choice) for question in QUESTIONS for choice in CHOICES),
    questions=tuple(number for number in range(len(QUESTIONS)) for _ in CHOICES),
)
ROLLING = Work("pages", "loglikelihood_rolling", ((HEADER * 3,), (HEADER,)), (0, 1), max_length=24)
