"""A made-up work of generation for the tests of the benchmarks."""

from __future__ import annotations

from benchmarks.side_by_side.generation_works import GenerationWork

HEADER = "The answer is 42. Question: what is the quick brown fox? Answer:"
QUESTIONS = (" the lazy dog", " the fox. Answer:", " what")

GENERATION = GenerationWork(
    "made-up",
    tuple(HEADER + question for question in QUESTIONS),
    ({"until": ["\n", "é"], "max_gen_toks": 12}, {"until": "zz", "max_gen_toks": 12}, {"max_gen_toks": 8}),
)
