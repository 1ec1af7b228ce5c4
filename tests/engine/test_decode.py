from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_eval_kernels import logprob

from mlx_eval import config
from mlx_eval.engine import budget
from mlx_eval.engine.batches import Limits
from mlx_eval.engine.counts import DecodeCounts
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.sharing import find_sharing
from mlx_eval.engine.stops import Thinking
from mlx_eval.engine.together import ALONE
from mlx_eval.errors import ModelError, OutOfMemoryError
from mlx_eval.harness.encoding import Encoder
from mlx_eval.models.head import RowHead
from mlx_eval.records import Generation, GenerationRequest, Sampling
from tests.engine import decoders
from tests.engine.decoders import (
    BATCHED,
    EOS,
    KEYS_ONLY,
    KINDS,
    SCRIPTED,
    TOGETHER,
    VOCAB,
    Difference,
    allowed,
    assert_oracles,
    difference,
    distinct_tokens,
    ids_of,
    oracle_answer,
    random_model,
    random_prompts,
    set_run_tokens,
)
from tests.tiny import (
    FIRST_SCRIPT,
    SCRIPT_EOS,
    SCRIPT_VOCAB,
    SECOND_EOS,
    THINK,
    THINK_END,
    ScriptedModel,
    script_tokenizer,
    tiny_model,
)


@functools.cache
def decode() -> Any:
    return Encoder(script_tokenizer()).decode


def answers(
    model: ScriptedModel,
    requests: Sequence[GenerationRequest],
    batch_size: int | None = 3,
    eos: Sequence[int] = (SCRIPT_EOS,),
    **options: Any,
) -> list[Generation]:
    """Of a `ScriptedModel`, in the order of the requests."""
    return decoders.answers(model, requests, batch_size, eos=eos, decode=decode(), **options)


def scripted(
    script: int, max_tokens: int = 50, prompt: Sequence[int] = b">", **options: Any
) -> GenerationRequest:
    return GenerationRequest((*prompt, FIRST_SCRIPT + script), max_tokens, **options)


def said(
    kind: str, requests: Sequence[GenerationRequest], batch_size: int | None = 3, **options: Any
) -> list[Generation]:
    """Of a random model, in the order of the requests."""
    return decoders.answers(random_model(kind), requests, batch_size, allows=allowed(kind), **options)


def as_requests(prompts: Sequence[tuple[int, ...]], seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [GenerationRequest(prompt, int(rng.integers(1, 15))) for prompt in prompts]


def steps_of(model: ScriptedModel) -> list[int]:
    """Rows of each plain step; prompts of these tests have two tokens or more before their last one."""
    return [rows for rows, length in model.calls if length == 1]


# ---------------------------------------------------------------- greedy answers


def test_no_requests_call_nothing() -> None:
    model = ScriptedModel("abc")
    assert answers(model, []) == []
    assert model.calls == []


@pytest.mark.parametrize("stored_once", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 5, None])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_the_oracles(
    kind: str, batch_size: int | None, stored_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a stem that is copied or stored once and behind none, refilled as others end."""
    if stored_once:
        set_run_tokens(monkeypatch, 0)
    requests = as_requests(random_prompts(6, behind=6, others=5))
    assert_oracles(random_model(kind), requests, said(kind, requests, batch_size))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "recurrent_gemma"])
def test_neither_order_nor_batch_size_changes_an_answer(kind: str) -> None:
    rng = np.random.default_rng(1)
    requests = as_requests(random_prompts(6, behind=6, others=5))
    for batch_size in (2, 3, 4, 32):
        order = rng.permutation(len(requests)).tolist()
        found = said(kind, [requests[index] for index in order], batch_size)
        assert_oracles(random_model(kind), [requests[index] for index in order], found)


def test_equal_prompts_and_prompts_that_begin_one_another() -> None:
    prompts = [(9, 10, 11, 12), (9, 10, 11, 12), (9, 10, 11), (9,), (9, 10, 11, 12, 13, 14), (9,)]
    requests = [GenerationRequest(prompt, 6) for prompt in prompts]
    for kind in ("llama", "mamba2"):
        assert_oracles(random_model(kind), requests, said(kind, requests, 4))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_prompts_in_any_order_and_batch_size(data: st.DataObject) -> None:
    ids = st.lists(st.integers(8, 11), min_size=1, max_size=9)
    prompts = data.draw(st.lists(ids, min_size=1, max_size=6))
    requests = [GenerationRequest(tuple(prompt), data.draw(st.integers(1, 6))) for prompt in prompts]
    run_tokens = data.draw(st.sampled_from([0, config.RUN_TOKENS]))
    with pytest.MonkeyPatch.context() as patch:
        set_run_tokens(patch, run_tokens)
        found = said("llama", requests, data.draw(st.integers(1, 4)))
    assert_oracles(random_model(), requests, found)


def test_a_prompt_longer_than_a_prefill_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "PREFILL_STEP", 4)
    monkeypatch.setattr(config, "CPU_PREFILL_STEP", 4)
    requests = [GenerationRequest(tuple(range(8, 38)), 6), GenerationRequest((9, 50), 2)]
    for batch_size in (1, 2):
        assert_oracles(random_model(), requests, said("llama", requests, batch_size))


def test_a_difference_is_told_apart_from_a_near_tie() -> None:
    """Two rows of the output layer are as good as equal: either token may come."""
    model = tiny_model("llama", VOCAB, seed=3)
    prompt = (9, 10, 11)
    expected = oracle_answer(model, prompt, 4)
    twin = next(index for index in range(8, VOCAB) if index not in expected)
    model.lm_head.weight[twin] = model.lm_head.weight[expected[2]] * (1 - 1e-7)
    model.model.embed_tokens.weight[twin] = model.model.embed_tokens.weight[expected[2]]
    assert difference(model, prompt, expected, expected) is None
    tie = difference(model, prompt, [*expected[:2], twin, expected[3]], expected)
    assert tie is not None
    assert tie.place == 2
    assert tie.is_tie
    other = next(index for index in range(8, VOCAB) if index not in (twin, expected[1]))
    wrong = difference(model, prompt, [expected[0], other, *expected[2:]], expected)
    assert wrong is not None
    assert (wrong.place, wrong.is_tie) == (1, False)
    assert difference(model, prompt, expected[:3], expected) == Difference(3, math.inf)
    found = [Generation(decoders.as_text([*expected[:1], other]), 2, "length")]
    with pytest.raises(AssertionError, match=r"request 0: Difference\(place=1"):
        assert_oracles(model, [GenerationRequest(prompt, 2)], found)


# ---------------------------------------------------------------- stops and limits


def test_each_row_has_its_own_stops_and_limit() -> None:
    model = ScriptedModel("hello world", "one two three", "\u00e9t\u00e9 \U0001f600!")
    requests = [
        scripted(0, stop=("o w",)),
        scripted(0, stop=("z", "l")),
        scripted(0),
        scripted(1, max_tokens=5, prompt=b"a longer prompt"),
        scripted(2, stop=("\U0001f600",)),
        scripted(2),
    ]
    for speculate in (0, 3):
        assert answers(model, requests, 4, speculate=speculate) == [
            Generation("hell", 7, "stop"),
            Generation("he", 3, "stop"),
            Generation("hello world", 12, "stop"),
            Generation("one t", 5, "length"),
            Generation("\u00e9t\u00e9 ", 10, "stop"),
            Generation("\u00e9t\u00e9 \U0001f600!", 12, "stop"),
        ]


@pytest.mark.parametrize("eos", [SCRIPT_EOS, SECOND_EOS])
def test_every_end_of_sequence_id_stops(eos: int) -> None:
    model = ScriptedModel([*b"ab", eos, *b"cd"])
    (answer,) = answers(model, [scripted(0)], eos=(SCRIPT_EOS, SECOND_EOS))
    assert answer == Generation("ab", 3, "stop")


def test_an_end_of_sequence_id_that_is_none_of_the_models_does_not_stop() -> None:
    model = ScriptedModel([*b"ab", SECOND_EOS, *b"cd"])
    (answer,) = answers(model, [scripted(0)], eos=(SCRIPT_EOS,))
    assert answer.text == "abcd"


def test_a_model_without_end_of_sequence_runs_to_its_limit() -> None:
    (answer,) = answers(ScriptedModel("abcdef"), [scripted(0, 4)], eos=())
    assert answer == Generation("abcd", 4, "length")


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_end_of_sequence_as_first_token_leaves_an_empty_text(batch_size: int) -> None:
    model = ScriptedModel([SCRIPT_EOS, *b"ab"], "xy")
    assert answers(model, [scripted(0), scripted(1)], batch_size) == [
        Generation("", 1, "stop"),
        Generation("xy", 3, "stop"),
    ]


def test_thinking_sections_are_no_part_of_the_answer() -> None:
    model = ScriptedModel(
        [THINK, *b"a\nb", THINK_END, *b"yes\nno"],
        [*b"a\nb", THINK_END, *b"yes\nno"],
        [THINK, *b"a\nb and so on"],
    )
    thinking = Thinking("<|think|>", "<|endthink|>", (THINK_END,), (THINK,))
    requests = [
        scripted(0, stop=("\n",)),
        scripted(1, stop=("\n",), in_thinking=True),
        scripted(2, 6, stop=("\n",)),
    ]
    assert answers(model, requests, thinking=thinking) == [
        Generation("yes", 9, "stop"),
        Generation("yes", 8, "stop"),
        Generation("", 6, "length", unfinished_thinking=True),
    ]


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("stop", [("c",), ()])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_at_most_one_token_a_row_is_computed_after_a_stop(stop: tuple[str, ...], batch_size: int) -> None:
    """A stop at the third token, by text or by end-of-sequence, of a limit of 50."""
    model = ScriptedModel("abcdefgh" if stop else "ab")
    counts = DecodeCounts()
    found = answers(model, [scripted(0, stop=stop, prompt=b"xy")] * 2, batch_size, counts=counts)
    assert [answer.num_tokens for answer in found] == [3, 3]
    assert counts.discarded_tokens == 2
    # the prompt is read once for both
    assert model.calls == [(1, 2)] + ([(2, 1)] * 4 if batch_size == 2 else [(1, 1)] * 8)


def test_nothing_is_computed_after_a_limit() -> None:
    model = ScriptedModel("abcdef" * 3)
    counts = DecodeCounts()
    answers(model, [scripted(0, limit, prompt=b"xy") for limit in (3, 9, 1, 17)], 2, counts=counts)
    assert counts.discarded_tokens == 0
    assert sum(steps_of(model)) == counts.generated_tokens == 3 + 9 + 1 + 17


def test_one_token_each_takes_one_step_and_no_more() -> None:
    model = ScriptedModel("ab", "xy")
    requests = [scripted(number % 2, 1, prompt=[number, 50, 51]) for number in range(4)]
    found = answers(model, requests, 2)
    assert found == [Generation("a", 1, "length"), Generation("x", 1, "length")] * 2
    assert model.calls == [(2, 3), (2, 1)] * 2


def test_rows_that_end_make_room_for_those_that_wait_at_once() -> None:
    """Limits of 8 to 15 tokens in four places: no step has fewer rows while one waits."""
    model = ScriptedModel("abcdefghijklmnop")
    limits = np.random.default_rng(0).integers(8, 16, 14).tolist()
    requests = [scripted(0, limit, prompt=[index, 50, 51]) for index, limit in enumerate(limits)]
    counts = DecodeCounts()
    found = answers(model, requests, 4, counts=counts)
    assert [answer.num_tokens for answer in found] == limits
    rows = steps_of(model)
    assert sum(rows) == sum(limits)
    assert rows == sorted(rows, reverse=True)
    assert sum(count < 4 for count in rows) < max(limits)
    assert counts.steps == len(rows)


def test_a_row_that_stops_makes_room_after_the_step_on_its_way() -> None:
    """The long row takes 12 tokens and its end, each short one two and the one on its way as it ends."""
    model = ScriptedModel("a" * 12, "b")
    requests = [scripted(0, prompt=b"xyz"), *(scripted(1, prompt=[index, 50]) for index in range(5))]
    counts = DecodeCounts()
    counted: list[int] = []
    answers(model, requests, 2, counts=counts, on_tokens=counted.append)
    assert sum(counted) == (4 + 13) + 5 * (3 + 2)  # prompts are counted with their first answer token
    assert counts.discarded_tokens == 6
    assert sum(steps_of(model)) == 14 + 5 * 3
    assert counts.generated_tokens == 13 + 5 * 2


def test_rows_that_may_become_longest_come_first() -> None:
    """So that no long row is left at the end to go on by itself."""
    model = ScriptedModel("a" * 40)
    limits = [2, 3, 2, 3, 40, 2, 3, 2]
    requests = [scripted(0, limit, prompt=[index, 50]) for index, limit in enumerate(limits)]
    answers(model, requests, 2)
    rows = steps_of(model)
    assert rows[: sum(limits) - 40] == [2] * 17
    assert rows == [2] * 17 + [1] * 23


def test_no_more_rows_go_together_than_asked_for() -> None:
    model = ScriptedModel("abcd")
    requests = [scripted(0, 4, prompt=[index, 50]) for index in range(9)]
    answers(model, requests, 4)
    assert max(rows for rows, _ in model.calls) == 4
    del model.calls[:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DECODE_ROWS", 6)
        answers(model, requests, None)
    assert max(rows for rows, _ in model.calls) == 6


def test_the_most_rows_are_counted_as_they_are_in_a_step() -> None:
    model = ScriptedModel("abcd")
    counts = DecodeCounts()
    answers(model, [scripted(0, 4, prompt=[index, 50]) for index in range(9)], 4, counts=counts)
    assert counts.peak_rows == 4


def test_common_beginnings_of_prompts_are_computed_once() -> None:
    """Prompts of one length whose stems are long enough that no split is given up."""
    model = ScriptedModel("abcdefgh")
    rng = np.random.default_rng(0)
    header, *passages = (rng.integers(10, 200, size).tolist() for size in (40, 30, 30))
    prompts = [
        (*header, *passage, *rng.integers(10, 200, 20).tolist(), FIRST_SCRIPT)
        for passage in passages
        for _ in range(5)
    ]
    counts = DecodeCounts()
    answers(model, [GenerationRequest(prompt, 8) for prompt in prompts], 4, counts=counts)
    assert counts.prompt_tokens == 10 * 91
    assert counts.unique_tokens == distinct_tokens(prompts) == 40 + 2 * 30 + 10 * 21
    assert counts.prefill_tokens == counts.unique_tokens
    prefill = [(rows, length) for rows, length in model.calls if length > 1]
    assert len(prefill) == counts.prefill_forwards
    assert sum(rows * length for rows, length in prefill) == 40 + 2 * 30 + 10 * 20 + counts.prefill_padding
    assert len(model.calls) == counts.prefill_forwards + counts.steps


def test_prompts_that_share_nothing_are_each_read_once() -> None:
    model = ScriptedModel("abcdefgh")
    requests = [scripted(0, 8, prompt=[index] * (3 + index)) for index in range(7)]
    counts = DecodeCounts()
    answers(model, requests, 3, counts=counts)
    total = sum(len(request.prompt_ids) for request in requests)
    assert counts.prompt_tokens == counts.unique_tokens == counts.prefill_tokens == total


def test_prompts_of_one_token_go_with_the_others_or_alone_where_there_is_a_state() -> None:
    """A recurrent state that has not begun is not the zeros of a batch."""
    model = ScriptedModel("ab", "xy")
    requests = [scripted(0, 1, prompt=b""), scripted(0, 1), scripted(1, 1), scripted(1, 1, prompt=b"")]
    assert [answer.text for answer in answers(model, requests, 4)] == ["a", "a", "x", "x"]
    assert model.calls == [(1, 1), (4, 1)]
    counts = DecodeCounts()
    one = [GenerationRequest(prompt, 3) for prompt in ((9,), (10, 11), (12, 13, 14), (15,))]
    assert_oracles(random_model("mamba"), one, said("mamba", one, 4, counts=counts))
    assert counts.peak_rows == 2


def test_every_step_is_one_pass_over_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_eval.engine import steps

    passes: list[tuple[int, ...]] = []

    def counted(logits: Any, targets: Any) -> Any:
        passes.append((*logits.shape, *targets.shape))
        return logprob(logits, targets)

    monkeypatch.setattr(steps, "logprob", counted)
    model = ScriptedModel("abcdef", "xy")
    answers(model, [scripted(0, prompt=b"123"), scripted(1, prompt=b"45"), scripted(1, prompt=b"6789")], 2)
    assert passes == [(rows, SCRIPT_VOCAB, rows, 0) for rows in steps_of(model)]


def test_the_models_memory_is_wired_once_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextlib.contextmanager
    def wired(network: Any) -> Iterator[None]:
        entered.append(network)
        yield

    monkeypatch.setattr(budget, "wired", wired)
    model = ScriptedModel("ab")
    answers(model, [scripted(0)] * 3, 2)
    assert entered == [model]


# ---------------------------------------------------------------- speculation


LONG = 12
"""Ids of a prompt that no draft is as long as: so its call is known from steps."""


def decode_calls(model: ScriptedModel) -> list[tuple[int, int]]:
    """(rows, tokens) of each step, the calls that read `LONG` prompts left out."""
    return [(rows, length) for rows, length in model.calls if length < LONG]


@pytest.mark.parametrize("speculate", [0, 1, 3, None])
@pytest.mark.parametrize("kind", [*BATCHED, "gemma2"])
def test_drafts_change_no_answer(kind: str, speculate: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that repeat themselves, so that there is something to draft, behind stems and not."""
    set_run_tokens(monkeypatch, 0)
    requests = repeating_requests(0)
    counts = DecodeCounts()
    found = said(kind, requests, 4, speculate=speculate, counts=counts)
    assert_oracles(random_model(kind), requests, found)
    assert 0 <= counts.accepted_tokens <= counts.drafted_tokens
    if speculate == 0 or kind not in KEYS_ONLY:
        assert counts.drafted_tokens == 0
    elif speculate is not None:
        assert counts.drafted_tokens > 0


def repeating_requests(seed: int) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    stem = rng.integers(8, 14, 24).tolist()
    prompts = [(*stem, *rng.integers(8, 12, size).tolist()) for size in (2, 4, 7)]
    prompts += [tuple(rng.integers(8, 11, size).tolist()) for size in (1, 3, 16)]
    return [GenerationRequest(prompt, int(rng.integers(6, 16))) for prompt in prompts]


@pytest.mark.parametrize("seed", range(6))
def test_drafts_change_no_answer_of_any_model(seed: int) -> None:
    model = random_model("llama", 10 + seed)
    requests = repeating_requests(seed)
    texts = []
    for speculate in (0, 2, 5):
        found = decoders.answers(model, requests, 3, allows=allowed(), speculate=speculate)
        assert_oracles(model, requests, found)
        texts.append([ids_of(answer) for answer in found])
    assert texts[0] == texts[1] == texts[2]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(list(b"abc")), min_size=1, max_size=12), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14)), min_size=2, max_size=6),
    st.integers(1, 6),
    st.integers(2, 4),
)
def test_drafts_of_any_script_are_verified_and_counted(
    scripts: list[list[int]], asked: list[tuple[int, int]], speculate: int, batch_size: int
) -> None:
    """Each step gives each row a token, and each drafted one that was right: all that is computed is used or told."""
    model = ScriptedModel(*scripts)
    requests = [
        scripted(number % len(scripts), limit, prompt=[index] * LONG, stop=("cab",))
        for index, (number, limit) in enumerate(asked)
    ]
    plain = answers(model, requests, batch_size)
    del model.calls[:]
    counts = DecodeCounts()
    assert answers(model, requests, batch_size, speculate=speculate, counts=counts) == plain
    calls = decode_calls(model)
    assert len(calls) == counts.steps
    assert counts.generated_tokens == sum(answer.num_tokens for answer in plain)
    assert (
        sum(rows for rows, _ in calls) + counts.accepted_tokens
        == counts.generated_tokens + counts.discarded_tokens
    )
    assert 0 <= counts.accepted_tokens <= counts.drafted_tokens


def test_a_text_that_repeats_itself_takes_a_step_for_each_draft() -> None:
    """Two rows of 48 tokens: the first five find no match, then three drafts are right in each step."""
    model = ScriptedModel("abc" * 16, "xyz" * 16)
    counts = DecodeCounts()
    requests = [scripted(number, 48, prompt=[50] * LONG) for number in (0, 1)]
    found = answers(model, requests, 2, speculate=3, counts=counts)
    assert [answer.text for answer in found] == ["abc" * 16, "xyz" * 16]
    calls = decode_calls(model)
    assert calls[:5] == [(2, 1)] * 5
    assert calls[5:] == [(2, 4)] * 10 + [(2, 3)]  # 3 tokens are left to the limit
    assert counts.steps == 16
    assert counts.accepted_tokens == 2 * (10 * 3 + 2)
    assert counts.discarded_tokens == 0


def test_only_tokens_that_were_verified_are_counted_as_drafted() -> None:
    """Drafts are cut where a limit comes before."""
    model = ScriptedModel("abc" * 16, "xyz" * 16)
    counts = DecodeCounts()
    requests = [scripted(number, 48, prompt=[50] * LONG) for number in (0, 1)]
    answers(model, requests, 2, speculate=3, counts=counts)
    assert counts.drafted_tokens == counts.accepted_tokens == 2 * (10 * 3 + 2)


def test_wrong_drafts_cost_no_tokens_but_their_own() -> None:
    """The same beginning goes on otherwise each time: every draft is wrong."""
    script = "".join(f"ab{chr(ord('c') + index)}" for index in range(10))
    model = ScriptedModel(script)
    counts = DecodeCounts()
    found = answers(
        model, [scripted(0, 30, prompt=[number, 50]) for number in (0, 1)], 2, speculate=2, counts=counts
    )
    assert [answer.text for answer in found] == [script] * 2
    assert counts.steps == 30
    assert counts.drafted_tokens > 0
    assert counts.accepted_tokens == 0


def test_rows_that_sample_go_on_beside_rows_with_drafts() -> None:
    model = ScriptedModel("abc" * 8, "mnopqrstuvwx" * 2, spread=0.1)
    sampling = Sampling(temperature=1.0, seed=5)
    plain = ScriptedModel("abc" * 8, "mnopqrstuvwx" * 2)
    alone = answers(model, [scripted(1, 20, sampling=sampling)])[0].text
    requests = [scripted(0, 20), scripted(1, 20, sampling=sampling), scripted(0, 14)]
    assert answers(model, requests, 3, speculate=3)[1].text == alone
    greedy = answers(plain, [requests[0], requests[2]], 2, speculate=3)
    assert [answer.text for answer in greedy] == [("abc" * 8)[:20], ("abc" * 8)[:14]]


def test_penalised_rows_are_not_drafted() -> None:
    """The most probable token after a penalty is another one than the model's."""
    model = ScriptedModel("abc" * 8)
    counts = DecodeCounts()
    penalty = Sampling(repetition_penalty=1.01)
    requests = [scripted(0, 20, prompt=[number, 50], sampling=penalty) for number in range(2)]
    found = answers(model, requests, 2, speculate=3, counts=counts)
    assert [answer.text for answer in found] == [("abc" * 8)[:20]] * 2
    assert counts.drafted_tokens == 0


# ---------------------------------------------------------------- memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes rows may take; answers are expected to be short."""

    def limited(rows_bytes: int) -> None:
        monkeypatch.setattr(config, "EXPECTED_TOKENS", 4)
        limits = Limits(8, kv_bytes=math.ceil(rows_bytes * 4 / 3))  # a quarter is for reading
        monkeypatch.setattr(budget, "scoring_limits", lambda cache: limits)

    return limited


def long_script(number: int) -> str:
    rng = np.random.default_rng(number)
    return "".join(chr(97 + one) for one in rng.integers(0, 26, 100))


@pytest.mark.parametrize("speculate", [0, 3])
def test_rows_that_outgrow_the_memory_are_put_back_and_go_on_later(memory: Any, speculate: int) -> None:
    """8 rows of 64 slots fit in; as they grow to 128 slots, four do."""
    model = ScriptedModel(*map(long_script, range(8)))
    requests = [scripted(number, 90, prompt=b"12") for number in range(8)]
    free = answers(model, requests, 8)
    assert [answer.text for answer in free] == [long_script(number)[:90] for number in range(8)]
    memory(8 * 64 * SCRIPTED.cache.token_bytes)
    del model.calls[:]
    counts = DecodeCounts()
    assert answers(model, requests, 8, counts=counts, speculate=speculate) == free
    assert counts.restarted_rows == 4
    # they are begun again behind their answers so far, of which each had some 60 tokens
    computed = counts.prefill_tokens - 8 * 3
    assert 4 * 50 < computed < 4 * 80
    assert counts.generated_tokens == 8 * 90
    assert max(rows for rows, _ in model.calls) == 8


def test_counts_of_drafts_are_right_where_rows_were_put_back(memory: Any) -> None:
    """Rows that have left are not drafted for."""
    scripts = [("abcdefghij" * 10)[number:][:89] for number in range(8)]
    model = ScriptedModel(*scripts)
    requests = [scripted(number, 80, prompt=[50] * LONG) for number in range(8)]
    memory(8 * 64 * SCRIPTED.cache.token_bytes)
    counts = DecodeCounts()
    found = answers(model, requests, 8, speculate=3, counts=counts)
    assert [answer.text for answer in found] == [script[:80] for script in scripts]
    assert counts.restarted_rows > 0
    assert counts.accepted_tokens <= counts.drafted_tokens
    computed = sum(rows for rows, _ in decode_calls(model)) + counts.accepted_tokens
    assert computed == counts.generated_tokens + counts.discarded_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "recurrent_gemma"])
def test_answers_that_were_begun_again_are_the_oracles(kind: str, memory: Any) -> None:
    prompts = [(*range(10, 10 + 56 + row), 9 + row) for row in range(4)]
    requests = [GenerationRequest(prompt, 14) for prompt in prompts]
    cache = allowed(kind)[0].cache
    memory(4 * 64 * cache.token_bytes + 4 * cache.row_bytes)
    counts = DecodeCounts()
    found = said(kind, requests, 4, counts=counts, eos=())
    for request, answer in zip(requests, found, strict=True):
        given = [int(word) for word in answer.text.split()]
        other = difference(random_model(kind), request.prompt_ids, given, full_answer(kind, request))
        assert other is None or other.is_tie
    assert kind != "llama" or counts.restarted_rows > 0


def full_answer(kind: str, request: GenerationRequest) -> list[int]:
    """Greedy ids up to the limit, whatever they are."""
    from tests.tiny import oracle_generate

    return oracle_generate(random_model(kind), request.prompt_ids, request.max_tokens)[0]


def test_memory_that_holds_a_row_at_a_time_is_enough(memory: Any) -> None:
    model = ScriptedModel("abc", "xyz")
    requests = [scripted(number % 2, 3, prompt=[number, 50]) for number in range(5)]
    memory(8)
    assert [answer.text for answer in answers(model, requests, 4)] == ["abc", "xyz", "abc", "xyz", "abc"]
    assert {rows for rows, length in model.calls if length == 1} == {1}


class OutOfMemory(ScriptedModel):
    """Has memory for so many rows in a step."""

    most_rows = 2
    after = 0
    """Steps that have memory all the same."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(inputs, cache)
        if inputs.shape[1] == 1:
            self.after -= 1
            if inputs.shape[0] > self.most_rows and self.after < 0:
                raise RuntimeError("[malloc_or_wait] Unable to allocate 2 bytes.")
        return logits


@pytest.mark.parametrize("after", [0, 1, 5])
def test_rows_are_halved_when_memory_runs_out_and_nothing_is_lost(
    after: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = OutOfMemory("abcdefghij", "klmnopqrst")
    model.after = after
    requests = [scripted(number % 2, 4 + number, prompt=[number, 50]) for number in range(7)]
    counts = DecodeCounts()
    counted: list[int] = []
    found = answers(model, requests, 4, counts=counts, on_tokens=counted.append)
    texts = ["abcdefghij", "klmnopqrst"]
    assert [answer.text for answer in found] == [texts[number % 2][: 4 + number] for number in range(7)]
    assert counts.restarted_rows == (4 if after > 1 else 0)  # rows without a token yet are not begun again
    assert sum(counted) == counts.generated_tokens + counts.prompt_tokens
    assert "at most 2 rows" in caplog.text
    assert "at most 1 rows" not in caplog.text
    rows = [rows for rows, length in model.calls if length == 1]
    assert rows[after] > 2
    assert set(rows[after + 1 :]) <= {1, 2}


def test_of_memory_for_one_row_each_is_continued_by_itself() -> None:
    model = OutOfMemory("abcdefghij", "klmnopqrst")
    model.most_rows = 1
    found = answers(model, [scripted(number % 2, 4, prompt=[number, 50]) for number in range(5)], 4)
    assert [answer.text for answer in found] == ["abcd", "klmn"] * 2 + ["abcd"]


def test_memory_for_no_row_is_one_clear_error() -> None:
    model = OutOfMemory("abcdefghij")
    model.most_rows = 0
    with pytest.raises(OutOfMemoryError, match=r"not a prompt of 3 tokens.*--max_length"):
        answers(model, [scripted(0, 4, prompt=[number, 50]) for number in range(3)], 2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_rows_that_memory_ran_out_for_go_on_as_they_would_have(
    kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(kind, VOCAB, seed=3, **KINDS[kind])
    requests = [
        GenerationRequest(prompt, 10, sampling=Sampling(temperature=temperature, seed=index))
        for index, prompt in enumerate(random_prompts(8, behind=3, others=3))
    ]
    alone = [decoders.answers(model, [one], 1, allows=allowed(kind))[0] for one in requests]
    num_steps = 0

    class Short(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            nonlocal num_steps
            num_steps += inputs.shape[1] == 1 and inputs.shape[0] > 2
            if num_steps in (4, 9):
                num_steps += 1
                raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Short
    counts = DecodeCounts()
    found = decoders.answers(model, requests, 6, allows=allowed(kind), counts=counts)
    assert counts.restarted_rows > 0
    for one, answer, own in zip(requests, found, alone, strict=True):
        other = difference(model, one.prompt_ids, ids_of(answer), ids_of(own))
        assert other is None or (temperature == 0.0 and other.is_tie)


def test_another_error_of_a_batch_has_the_rest_continued_one_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(ScriptedModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            if inputs.shape[0] > 1 and len(self.calls) > 4:
                raise ValueError("no more batches")
            return super().__call__(inputs, cache)

    model = Refusing("abcdefgh", "xyzuvwst")
    requests = [scripted(number % 2, 6, prompt=[number, 50]) for number in range(4)]
    assert [answer.text for answer in answers(model, requests, 2)] == ["abcdef", "xyzuvw"] * 2
    assert "no more batches" in caplog.text


# ---------------------------------------------------------------- NaN


class Overflowing(ScriptedModel):
    """Gives one logit that is no finite number after an exclamation mark, in batches only or always."""

    value = math.nan
    in_batches_only = False

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        logits = super().__call__(inputs, cache)
        if self.in_batches_only and inputs.shape[0] == 1:
            return logits
        is_damaged = (inputs == ord("!"))[..., None] & (mx.arange(SCRIPT_VOCAB) == 5)
        return mx.where(is_damaged, self.value, logits)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_nan_is_one_clear_error_and_finished_answers_are_not_lost(
    batch_size: int, value: float, sampling: Sampling
) -> None:
    model = Overflowing("okay!", "a")
    model.value = value
    found: dict[int, Generation] = {}
    requests = [scripted(1, prompt=b"12"), scripted(0, prompt=b"x", sampling=sampling), scripted(1)]
    with pytest.raises(
        ModelError,
        match=r"NaN or infinite logits after a prompt of 2 tokens and 5 of its answer.*--dtype float32",
    ):
        Decoder(model, SCRIPTED, find_decoding=lambda: TOGETHER).run(
            requests,
            batch_size=batch_size,
            decode=decode(),
            eos_token_ids=frozenset([SCRIPT_EOS]),
            on_generation=found.__setitem__,
        )
    assert found[0] == Generation("a", 2, "stop")
    assert 1 not in found


@pytest.mark.parametrize("speculate", [0, 2])
def test_a_row_that_gives_nan_beside_others_only_is_continued_by_itself(
    speculate: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Overflowing("hi! and more", "a long text, a long text")
    model.in_batches_only = True
    requests = [scripted(0, stop=("mo",)), scripted(1), scripted(0, 5)]
    assert answers(model, requests, 3, speculate=speculate) == [
        Generation("hi! and ", 10, "stop"),
        Generation("a long text, a long text", 25, "stop"),
        Generation("hi! a", 5, "length"),
    ]
    assert "2 prompts gave NaN beside others" in caplog.text


@pytest.mark.parametrize("kind", BATCHED)
def test_a_row_without_numbers_does_not_spoil_the_one_that_takes_its_place(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model that gives NaN in batches, after one token: what such a row has read is no number either."""
    model = tiny_model(kind, VOCAB, seed=3, **KINDS[kind])
    prompts = [
        tuple(90 if one == 40 else one for one in ids) for ids in random_prompts(9, behind=4, others=4)
    ]
    prompts = [(*prompt, 40) if index % 3 == 0 else (*prompt, 91) for index, prompt in enumerate(prompts)]
    requests = [GenerationRequest(prompt, 6) for prompt in prompts]
    expected = [oracle_answer(model, prompt, 6) for prompt in prompts]
    used = {one for ids in (*prompts, *expected) for one in ids}
    no_number = next(one for one in range(8, VOCAB) if one not in used)
    embedding = next(one for path, one in model.named_modules() if "embed" in path and "weight" in one)
    embedding.weight[no_number] = mx.nan

    class Spoiled(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            if inputs.shape[0] > 1:
                inputs = mx.where(inputs == 40, no_number, inputs)
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Spoiled
    found = decoders.answers(model, requests, 2, allows=allowed(kind))
    for index, (request, answer) in enumerate(zip(requests, found, strict=True)):
        other = difference(model, request.prompt_ids, ids_of(answer), expected[index])
        assert other is None or other.is_tie
    spoiled = sum(40 in (*prompt, *ids[:-1]) for prompt, ids in zip(prompts, expected, strict=True))
    assert f"{spoiled} prompts gave NaN beside others" in caplog.text


# ---------------------------------------------------------------- sampling


def test_a_sampled_row_is_the_same_whatever_is_beside_it() -> None:
    model = ScriptedModel("abcdefghijkl", "mnopqrstuvwx", spread=0.1)
    sampling = Sampling(temperature=1.0, seed=5)
    one = scripted(0, 12, sampling=sampling)
    others = [scripted(1, 12, sampling=sampling.with_seed(seed)) for seed in range(4)]
    alone = answers(model, [one], 1)[0].text
    assert answers(model, [*others, one, scripted(1, 12)], 3)[4].text == alone
    assert len({answer.text for answer in answers(model, others)}) == 4, "other seeds give other texts"


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "recurrent_gemma"])
def test_sampled_and_greedy_rows_are_each_what_they_are_alone(kind: str) -> None:
    """Also with a penalty, which has to know the prompt and every token that came before."""
    ways = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(temperature=1.0, repetition_penalty=1.3),
        Sampling(repetition_penalty=1.3),
    ]
    requests = [
        GenerationRequest(prompt, 8, sampling=ways[index % len(ways)].with_seed(index))
        for index, prompt in enumerate(random_prompts(10, behind=5, others=5))
    ]
    alone = [said(kind, [one], 1)[0] for one in requests]
    for batch_size in (3, 10):
        assert said(kind, requests, batch_size) == alone


def test_sampled_rows_that_were_put_back_go_on_with_their_own_noise(memory: Any) -> None:
    model = ScriptedModel(*map(long_script, range(8)), spread=0.1)
    requests = [
        scripted(number, 80, prompt=b"12", sampling=Sampling(temperature=1.0, seed=number))
        for number in range(8)
    ]
    alone = [answers(model, [one], 1)[0] for one in requests[::3]]
    memory(8 * 64 * SCRIPTED.cache.token_bytes)
    counts = DecodeCounts()
    found = answers(model, requests, 8, counts=counts)
    assert counts.restarted_rows == 4
    assert found[::3] == alone


def test_half_precision_logits_are_compared_in_float32() -> None:
    """Two close logits that are equal once normalised in bfloat16: the larger one must win."""

    class Close(ScriptedModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            logits = super().__call__(inputs, cache)
            row = mx.zeros(logits.shape[-1])
            row[65], row[66] = 1.0, 1.0078125  # neighbours in bfloat16
            return (logits * 0 + row).astype(mx.bfloat16)

    for requests in ([scripted(0, 3)], [scripted(0, 3), scripted(0, 3)]):
        assert {answer.text for answer in answers(Close("x"), requests)} == {"BBB"}


# ---------------------------------------------------------------- models that cannot be batched


def test_what_a_model_allows_is_asked_once_and_before_anything_is_computed() -> None:
    model = tiny_model("llama", VOCAB, seed=3)
    calls: Counter[int] = Counter()

    class Counted(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            calls[inputs.shape[0]] += 1
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Counted
    decoder = Decoder(model)
    requests = [GenerationRequest((9, 10, 11), 3), GenerationRequest((9, 10, 12), 3)]

    def run(batch_size: int) -> list[str]:
        found: dict[int, Generation] = {}
        decoder.run(
            requests,
            batch_size=batch_size,
            decode=decoders.as_text,
            eos_token_ids=frozenset([EOS]),
            on_generation=found.__setitem__,
        )
        return [found[0].text, found[1].text]

    assert not calls
    alone = run(1)
    assert set(calls) > {1, 2}
    assert decoder.sharing == allowed()[0]
    calls.clear()
    assert run(2) == alone
    assert sum(calls.values()) == 1 + 3  # one for both prompts, and their steps


def test_a_model_that_cannot_be_decoded_in_batches_says_so_and_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unbatched(ScriptedModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            if inputs.shape[0] > 1:
                raise ValueError("no batches")
            return super().__call__(inputs, cache)

    requests = [scripted(0), scripted(1, 2, prompt=b"xy"), scripted(0, stop=("b",))]
    for allows in ((SCRIPTED, ALONE), (SCRIPTED, TOGETHER)):
        found = answers(Unbatched("abc", "xyz"), requests, allows=allows)
        assert [answer.text for answer in found] == ["abc", "xy", "a"]
        assert "one at a time" in caplog.text or "no batches" in caplog.text
        caplog.clear()


def test_caches_that_are_none_of_ours_are_used_as_they_are() -> None:
    """As llama4's."""
    from mlx_lm.models.cache import ChunkedKVCache

    class Chunked(ScriptedModel):
        def make_cache(self) -> list[Any]:
            return [ChunkedKVCache(64)]

    requests = [scripted(0), scripted(1, 2, prompt=b"xy"), scripted(0, stop=("b",))]
    found: dict[int, Generation] = {}
    Decoder(Chunked("abc", "xyz")).run(
        requests,
        batch_size=3,
        decode=decode(),
        eos_token_ids=frozenset([SCRIPT_EOS]),
        on_generation=found.__setitem__,
    )
    assert [found[index].text for index in range(3)] == ["abc", "xy", "a"]


def test_a_prompt_that_is_sampled_many_times_is_stored_once() -> None:
    model = tiny_model("llama", 120, 3, max_position_embeddings=1024)
    allows = find_sharing(model, RowHead(model, config.LOGITS_BYTES)), TOGETHER
    prompt = tuple(np.random.default_rng(0).integers(8, 120, 900).tolist())
    requests = [
        GenerationRequest(prompt, 4, sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(64)
    ]
    counts = DecodeCounts()

    def peak_and_answers(asked: Sequence[GenerationRequest]) -> tuple[int, list[Generation]]:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        found = decoders.answers(model, asked, 64, allows=allows, counts=counts)
        return mx.get_peak_memory() - before, found

    few, _ = peak_and_answers(requests[:4])
    many, found = peak_and_answers(requests)
    # what reading the prompt takes is in both; 60 copies of it would be as much as 54,000 tokens
    assert many - few < 4 * 900 * allows[0].cache.token_bytes
    assert (counts.prefill_tokens, counts.peak_rows) == (2 * 899 + 4 + 64, 64)
    assert found[:2] == decoders.answers(model, requests[:2], 1, allows=allows)


def test_a_row_at_a_time_shares_prompts_and_drafts() -> None:
    model = ScriptedModel("abcabc" * 8)
    requests = [scripted(0, 48, prompt=bytes([*b"shared stem " * 4, place])) for place in range(65, 69)]
    counts = DecodeCounts()
    found = answers(model, requests, 1, speculate=4, counts=counts)
    assert {answer.text for answer in found} == {"abcabc" * 8}
    assert counts.prefill_tokens == counts.unique_tokens < counts.prompt_tokens / 2
    assert counts.peak_rows == 1
    assert counts.steps < counts.generated_tokens / 2
