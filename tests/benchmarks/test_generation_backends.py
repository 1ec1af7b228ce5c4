from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.decoding import RowClock, first_differences, run_ours, run_peer
from benchmarks.generation_memory import CASES, prompts_of
from benchmarks.side_by_side.generation_backends import CountingModel, Ours, num_needed
from benchmarks.side_by_side.near_ties import NEAR_TIE, Gap, gap_after, main, part
from mlx_eval.engine.decode import Decoder
from tests.benchmarks.generations import GENERATION
from tests.tiny import bpe_tokenizer, oracle_generate, oracle_logits, tiny_model, write_directory

PROMPTS = [[5, 60, 7, 90], [8, 70, 9, 11], [200, 3, 4, 150]]


def letters(ids: list[int]) -> str:
    return "".join(chr(one) for one in ids)


@pytest.mark.parametrize(
    ("text", "stops", "eos", "needed"),
    [
        ("abcdef", ("cd",), "", 4),
        ("abcdef", ("cd", "ab"), "", 2),
        ("abcdef", (), "", 6),
        ("abcdef", ("x",), "", 6),
        ("abcdef", ("ef",), "c", 3),
        ("abcdef", ("a",), "c", 1),
        ("", ("a",), "", 0),
    ],
)
def test_an_answer_needs_the_tokens_up_to_the_one_that_ends_it(
    text: str, stops: tuple[str, ...], eos: str, needed: int
) -> None:
    assert num_needed([ord(one) for one in text], letters, stops, {ord(one) for one in eos}) == needed


def test_reading_prompts_and_steps_are_told_apart_at_the_models_call() -> None:
    model = tiny_model()
    counting = CountingModel(model)
    assert counting.layers is model.layers
    for shape in ((2, 5), (2, 1), (1, 1)):
        counting(mx.ones(shape, dtype=mx.int32))
    found = (counting.prefill_tokens, counting.prefill_rows, counting.prefill_forwards)
    assert (*found, counting.steps, counting.step_rows) == (10, 2, 1, 2, 3)


def test_ours_counts_one_call_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_directory(tmp_path, bpe_tokenizer())
    backend = Ours(str(tmp_path), "auto", "off")
    found = []
    for _ in range(2):
        texts = backend.generate(GENERATION)
        found.append(backend.results(GENERATION, texts))
    (answers, counts), (again, same) = found
    assert (answers, counts) == (again, same)
    lengths = [len(backend._lm.tok_encode(prompt)) for prompt in GENERATION.prompts]
    assert counts.prompt_tokens == sum(lengths)
    assert counts.unique_tokens is not None
    assert max(lengths) <= counts.unique_tokens <= counts.prefill_tokens <= sum(lengths)
    assert 0 < counts.generated_tokens <= sum(options["max_gen_toks"] for options in GENERATION.options)
    assert counts.peak_rows == len(lengths)


@pytest.mark.parametrize(
    ("ours", "theirs", "parting"),
    [
        ("abcd", "abxd", (2, ord("x"))),
        ("ab", "abcd", (2, ord("c"))),
        ("abcd", "ab", (2, None)),
        ("", "ab", (0, ord("a"))),
    ],
)
def test_texts_part_at_the_first_token_that_is_no_longer_ours(
    ours: str, theirs: str, parting: tuple[int, int | None]
) -> None:
    assert part(ours, [ord(one) for one in theirs], letters) == parting


def test_a_torn_character_is_no_difference() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    assert part("aéb", list("aéc".encode()), decode) == (3, ord("c"))


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_the_gap_is_that_of_a_whole_forward_pass(rank: int) -> None:
    model, ids = tiny_model(), [5, 60, 7, 90, 12]
    logits = oracle_logits(model, ids)[-1]
    order = np.argsort(-logits)
    found = gap_after(model, ids, int(order[rank]))
    assert found.rank == rank
    assert found.gap == pytest.approx(
        logits[order[0]] - logits[order[1]], abs=1e-5
    )  # float32, numbers below 20


def test_only_the_two_best_tokens_can_tie() -> None:
    assert Gap(NEAR_TIE / 2, 1).is_near_tie
    assert not Gap(NEAR_TIE / 2, 2).is_near_tie
    assert not Gap(2 * NEAR_TIE, 1).is_near_tie


def test_partings_of_texts_are_looked_up_in_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = write_directory(tmp_path / "model", bpe_tokenizer()), bpe_tokenizer()
    prompt = "the quick"
    prompt_ids, own_ids, other_ids = (tokenizer.encode(text) for text in (prompt, " brown fox", " brown dog"))
    text = {"question": 3, "prompt": prompt, "ours": tokenizer.decode(own_ids), "ids": other_ids}
    asked, found = tmp_path / "asked.json", tmp_path / "found.json"
    asked.write_text(json.dumps({"model": str(tmp_path / "model"), "texts": [text]}))
    monkeypatch.setattr("sys.argv", ["near_ties", str(asked), str(found)])
    main()
    (answer,) = json.loads(found.read_text())
    place = next(place for place, (a, b) in enumerate(zip(own_ids, other_ids, strict=False)) if a != b)
    expected = gap_after(model, prompt_ids + own_ids[:place], other_ids[place])
    assert answer["parting"] == {"question": 3, "place": place, "token": other_ids[place]}
    assert answer["gap"]["rank"] == expected.rank
    assert answer["gap"]["gap"] == pytest.approx(expected.gap, abs=1e-5)


def test_decoding_alone_gives_the_oracles_ids_both_ways() -> None:
    model, num_tokens = tiny_model(), 9
    expected = [oracle_generate(model, prompt, num_tokens)[0] for prompt in PROMPTS]
    runs = [run_ours(Decoder(model), PROMPTS, num_tokens), run_peer(model, PROMPTS, num_tokens)]
    assert [run.ids for run in runs] == [expected, expected]
    assert all(run.seconds.wall > 0 for run in runs)


def test_rows_that_differ_are_given_with_their_gap() -> None:
    model = tiny_model()
    ours = [oracle_generate(model, prompt, 4)[0] for prompt in PROMPTS]
    theirs = [list(ids) for ids in ours]
    theirs[1][2] = (theirs[1][2] + 1) % 330
    found = first_differences(model, PROMPTS, ours, theirs)
    assert list(found) == [1]
    assert found[1].rank > 0


def test_the_clock_waits_for_every_rows_first_token() -> None:
    clock = RowClock(2)
    clock.first()
    with pytest.raises(AssertionError):
        clock.stop()
    clock.first()
    assert clock.stop().wall >= 0


def test_prompts_share_all_that_they_may_or_nothing() -> None:
    sizes = argparse.Namespace(rows=6, shared_tokens=10, own_tokens=3)
    found = {case: np.array(prompts_of(np.arange(50), case, sizes)) for case in CASES}
    assert {prompts.shape for prompts in found.values()} == {(6, 13)}
    assert (found["shared"][:, :10] == found["shared"][0, :10]).all()
    assert len(set(found["shared"][:, 10].tolist())) == 6
    assert len(set(found["unshared"][:, 0].tolist())) == 6
