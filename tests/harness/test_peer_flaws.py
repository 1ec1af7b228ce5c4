"""Each flaw that mlx_lm.evaluate 0.32.2 was seen to have, as a test of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from mlx_eval.harness.lm import MLXEvalLM
from tests.tiny import (
    SCRIPT_EOS,
    TOLERANCE,
    ScriptedModel,
    assert_scores,
    bpe_tokenizer,
    loaded,
    oracle_score,
    request,
    script_tokenizer,
    tiny_model,
)


def backend(has_bos: bool = True, **options: Any) -> Any:
    return MLXEvalLM(loaded(tiny_model(), bpe_tokenizer(has_bos=has_bos)), **options)


def scripted(*scripts: Sequence[int] | str, spread: float = 0.0) -> Any:
    return MLXEvalLM(loaded(ScriptedModel(*scripts, spread=spread), script_tokenizer(), SCRIPT_EOS, 1000))


@pytest.mark.parametrize("pair", [("the quick ", "brown"), ("Ans", "wer"), ("the quick", "")])
def test_pairs_that_leave_no_continuation_token_are_answered(pair: tuple[str, str]) -> None:
    """There: IndexError."""
    lm = backend()
    (answer,) = lm.loglikelihood([request(*pair)])
    if pair[1]:
        assert_scores(lm.loaded.model, [lm._encode_pair(*pair)], [answer])
        assert answer[0] < 0
    else:
        assert answer == (0.0, True)


def test_an_empty_context_without_bos_is_conditioned_on_the_end_of_sequence() -> None:
    """There: minus infinity."""
    lm = backend(has_bos=False)
    (answer,) = lm.loglikelihood([request("", " quick")])
    assert math.isfinite(answer[0])
    assert_scores(lm.loaded.model, [([lm.eot_token_id], lm.tok_encode(" quick"))], [answer])


def test_rolling_scores_the_first_token_too() -> None:
    """There: it is left out."""
    lm = backend()
    (token,) = lm.tok_encode("Answer")
    expected, _, _ = oracle_score(lm.loaded.model, [lm.prefix_token_id], [token])
    assert expected < -1
    assert lm.loglikelihood_rolling([request("Answer")]) == [pytest.approx(expected, abs=TOLERANCE)]


def test_rolling_has_windows() -> None:
    """There: a text longer than the model's window runs through it in one piece."""
    lm = backend(max_length=8)
    text = "Question: what is the answer? " * 6
    ids = lm.tok_encode(text)
    assert len(ids) > 24
    whole, _, _ = oracle_score(lm.loaded.model, [lm.prefix_token_id], ids)
    (total,) = lm.loglikelihood_rolling([request(text)])
    assert abs(total - whole) > 0.1
    windows = lm._encoder.rolling_windows(text, 8)
    assert all(window.context_ids.size + window.continuation_ids.size <= 9 for window in windows)
    assert sum(len(window.continuation_ids) for window in windows) == len(ids)


def test_one_documents_score_does_not_change_with_its_batch() -> None:
    """There (mlx-lm #1855): padding of the batch changes it."""
    lm = backend(batch_size=4)
    texts = ["Answer", "the quick brown fox jumps over the lazy dog. " * 2, "what is 42?", "é"]
    together = lm.loglikelihood_rolling([request(text) for text in texts])
    alone = [lm.loglikelihood_rolling([request(text)])[0] for text in texts]
    assert together == pytest.approx(alone, abs=TOLERANCE)


def test_a_stop_ends_the_computation() -> None:
    """There: 64 of 64 tokens are generated after a stop at the first."""
    lm = scripted("." + "a" * 63)
    lm._ready_decoder()  # the head is looked for once
    del lm.loaded.model.calls[:]
    assert lm.generate_until([request("<|script0|>", {"until": ["."], "max_gen_toks": 64})]) == [""]
    assert len(lm.loaded.model.calls) <= 2
    assert lm.statistics.decoding.generated_tokens == 1


@pytest.mark.parametrize(("until", "text"), [([], "abcab"), ("ca", "ab"), ("ba", "abcab")])
def test_until_may_be_empty_and_a_string_is_one_stop(until: Any, text: str) -> None:
    """There: ValueError, and a string is split into its characters."""
    assert scripted("abcab").generate_until([request("<|script0|>", {"until": until})]) == [text]


def test_an_empty_prompt_is_continued() -> None:
    """There: a crash."""
    (text,) = backend().generate_until([request("", {"max_gen_toks": 3})])
    assert text


@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_no_requests_are_no_error(method: str) -> None:
    """There: a crash."""
    assert getattr(backend(), method)([]) == []


def test_the_text_is_not_cut_at_a_stop_inside_thinking() -> None:
    """There: it is."""
    lm: Any = MLXEvalLM(
        loaded(ScriptedModel("a\n\nb</think>yes\n\nno"), script_tokenizer(), SCRIPT_EOS, 1000),
        think_end_token="</think>",
    )
    assert lm.generate_until([request("<|script0|>", {"until": ["\n\n"]})]) == ["yes"]


def test_the_temperature_of_the_task_is_obeyed() -> None:
    """There: ignored."""
    lm = scripted("abcdefghijkl", spread=0.1)
    kwargs = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12}
    greedy, sampled = lm.generate_until(
        [request("<|script0|>", {"max_gen_toks": 12}), request("<|script0|>", kwargs)]
    )
    assert greedy == "abcdefghijkl" != sampled


@pytest.mark.parametrize(("batch_size", "calls"), [(1, 6), (2, 3), (6, 1)])
def test_batch_size_is_obeyed_when_scoring(batch_size: int, calls: int) -> None:
    """There: it does nothing."""
    lm: Any = MLXEvalLM(
        loaded(ScriptedModel("a"), script_tokenizer(), SCRIPT_EOS, 1000), batch_size=batch_size
    )
    pairs = [request(letter * 3, "y") for letter in "abcdef"]
    lm.loglikelihood(pairs[:1])  # the head is looked for once
    lm.loaded.model.calls.clear()
    lm.loglikelihood(pairs)
    assert len(lm.loaded.model.calls) == calls
    assert max(rows for rows, _ in lm.loaded.model.calls) == batch_size


def test_as_many_answers_as_requests_in_their_order() -> None:
    """There, over two ranks, another number of them."""
    lm = backend(batch_size=4)
    pairs = [("the quick brown fox"[: 3 + place], f" {place}") for place in range(13)]
    answers = lm.loglikelihood([request(*pair) for pair in pairs])
    assert_scores(lm.loaded.model, [lm._encode_pair(*pair) for pair in pairs], answers)
    assert lm.world_size == 1
