from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx_eval_kernels import logprob

from mlx_eval import config
from mlx_eval.engine import budget
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.stops import Thinking
from mlx_eval.errors import ModelError
from mlx_eval.harness.encoding import Encoder
from mlx_eval.records import Generation, GenerationRequest, Sampling
from tests.tiny import (
    FIRST_SCRIPT,
    NEAR_TIE,
    RECURRENT,
    SCRIPT_EOS,
    SCRIPT_VOCAB,
    SECOND_EOS,
    THINK,
    THINK_END,
    ScriptedModel,
    oracle_generate,
    script_tokenizer,
    tiny_model,
)

VOCAB = SCRIPT_EOS + 1
WINDOWED = {"query_pre_attn_scalar": 8, "sliding_window": 8, "sliding_window_pattern": 2}


@functools.cache
def decode() -> Any:
    return Encoder(script_tokenizer()).decode


@functools.cache
def random_model(kind: str = "llama") -> nn.Module:
    changes: dict[str, dict[str, Any]] = {
        "gemma2": {"query_pre_attn_scalar": 8},
        "gemma3_text": WINDOWED,
        **RECURRENT,
    }
    return tiny_model(kind, VOCAB, seed=3, **changes.get(kind, {}))


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the calls of the decoding itself reach the model."""
    monkeypatch.setattr("mlx_eval.engine.decode.decodes_together", lambda model: True)


def answers(
    model: nn.Module,
    requests: Sequence[GenerationRequest],
    batch_size: int = 3,
    eos: Sequence[int] = (SCRIPT_EOS,),
    **kw: Any,
) -> list[Generation]:
    """Answers in the order of the requests, each given exactly once."""
    found: dict[int, Generation] = {}
    calls: Counter[int] = Counter()

    def on_generation(index: int, generation: Generation) -> None:
        calls[index] += 1
        found[index] = generation

    Decoder(model).run(
        requests,
        batch_size=batch_size,
        decode=decode(),
        eos_token_ids=frozenset(eos),
        on_generation=on_generation,
        **kw,
    )
    assert calls == Counter(range(len(requests)))
    return [found[index] for index in range(len(requests))]


def scripted(script: int, max_tokens: int = 50, prompt: Sequence[int] = b">", **kw: Any) -> GenerationRequest:
    return GenerationRequest((*prompt, FIRST_SCRIPT + script), max_tokens, **kw)


def test_no_requests_call_nothing() -> None:
    model = ScriptedModel("abc")
    assert answers(model, []) == []
    assert model.calls == []


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "qwen3", *RECURRENT])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_greedy_answers_are_the_oracles(kind: str, batch_size: int) -> None:
    """gemma2: mlx-lm's batched decoding raises for 5 rows and is silently wrong for 2, its number of heads."""
    model = random_model(kind)
    prompts = [(5,), (1, 2, 3), tuple(range(40)), (9, 9), (100, 200, 7, 8, 4), (1, 2, 3, 4)]
    requests = [GenerationRequest(prompt, 8 + place) for place, prompt in enumerate(prompts)]
    found = answers(model, requests, batch_size)
    for request, answer in zip(requests, found, strict=True):
        ids, margin = oracle_generate(model, request.prompt_ids, request.max_tokens, (SCRIPT_EOS,))
        assert margin > NEAR_TIE, "choose another seed: the oracle itself is not sure"
        ended = ids[-1] == SCRIPT_EOS
        assert answer == Generation(decode()(ids), len(ids), "stop" if ended else "length")


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_order_and_batch_size_give_the_same_texts(data: st.DataObject) -> None:
    model = random_model()
    prompts = data.draw(
        st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=6)
    )
    requests = [GenerationRequest(tuple(prompt), 5) for prompt in prompts]
    order = data.draw(st.permutations(range(len(requests))))
    alone = [oracle_generate(model, request.prompt_ids, 5, (SCRIPT_EOS,)) for request in requests]
    found = answers(model, [requests[index] for index in order], data.draw(st.integers(1, 4)))
    for index, answer in zip(order, found, strict=True):
        ids, margin = alone[index]
        assert answer.text == decode()(ids) or margin < NEAR_TIE


def test_a_prompt_longer_than_a_prefill_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "PREFILL_STEP", 4)
    model = random_model()
    prompt = tuple(range(30))
    ids, margin = oracle_generate(model, prompt, 6, (SCRIPT_EOS,))
    assert margin > NEAR_TIE
    assert answers(model, [GenerationRequest(prompt, 6), GenerationRequest((1,), 2)])[0].text == decode()(ids)


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
    assert answers(model, requests, 4) == [
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


@pytest.mark.parametrize("stop", [("c",), ()])
def test_at_most_one_step_is_computed_after_a_stop(stop: tuple[str, ...]) -> None:
    """A stop at the third token, by text or by end-of-sequence, of a limit of 50."""
    model = ScriptedModel("abcdefgh" if stop else "ab")
    answers(model, [scripted(0, stop=stop, prompt=b"xy")])
    assert [steps for _, steps in model.calls] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("stop", [("c",), ()])
@pytest.mark.usefixtures("unprobed")
def test_at_most_one_step_is_computed_after_a_stop_in_a_batch(stop: tuple[str, ...]) -> None:
    model = ScriptedModel("abcdefgh" if stop else "ab")
    found = answers(model, [scripted(0, stop=stop, prompt=b"xy")] * 2, 2)
    assert model.calls == [(1, 2)] * 2 + [(2, 1)] * 4
    assert [answer.num_tokens for answer in found] == [3, 3]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.usefixtures("unprobed")
def test_an_end_of_sequence_as_first_token_leaves_an_empty_text(batch_size: int) -> None:
    model = ScriptedModel([SCRIPT_EOS, *b"ab"], "xy")
    assert answers(model, [scripted(0), scripted(1)], batch_size) == [
        Generation("", 1, "stop"),
        Generation("xy", 3, "stop"),
    ]


@pytest.mark.usefixtures("unprobed")
def test_one_token_each_takes_one_step_and_no_more() -> None:
    model = ScriptedModel("ab", "xy")
    requests = [scripted(script, 1, prompt=b"123") for script in (0, 1, 0, 1)]
    assert (
        answers(model, requests, 2)
        == [
            Generation("a", 1, "length"),
            Generation("x", 1, "length"),
        ]
        * 2
    )
    assert model.calls == [(1, 3), (1, 3), (2, 1)] * 2


@pytest.mark.usefixtures("unprobed")
def test_rows_that_end_make_room_for_those_that_wait() -> None:
    """The long row takes 13 steps and the one on its way as it ends, each short one two and one."""
    model = ScriptedModel("a" * 12, "b")
    requests = [scripted(0, prompt=b"xx"), *[scripted(1, prompt=b"x")] * 5]
    counted: list[int] = []
    answers(model, requests, 2, on_tokens=counted.append)
    assert sum(counted) == (3 + 13) + 5 * (2 + 2)  # prompts are counted with their first answer token
    assert model.calls[0] == (1, 2)
    # 14 steps of one row and 5 * 3 of the others, side by side but for one; each short prompt is a call as well
    assert Counter(model.calls[1:]) == {(2, 1): 14, (1, 1): 1 + 5}


@pytest.mark.usefixtures("unprobed")
def test_the_longest_prompts_are_started_first() -> None:
    model = ScriptedModel("a")
    answers(model, [scripted(0, 1, prompt=b"x" * length) for length in (3, 9, 5, 7, 1)], 2)
    assert [length for rows, length in model.calls if rows == 1 and length > 1] == [9, 7, 5, 3]


@pytest.mark.usefixtures("unprobed")
def test_prompts_of_one_token_are_continued_by_themselves() -> None:
    """They have no past, and a recurrent state that has not begun cannot be one row of a batch."""
    model = ScriptedModel("ab", "xy")
    requests = [scripted(0, 1, prompt=b""), scripted(0, 1), scripted(1, 1), scripted(1, 1, prompt=b"")]
    assert [answer.text for answer in answers(model, requests, 4)] == ["a", "a", "x", "x"]
    assert model.calls == [(1, 1), (1, 1), (2, 1), (1, 1), (1, 1)]


@pytest.mark.usefixtures("unprobed")
def test_every_step_is_one_pass_over_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_eval.engine import steps

    passes: list[tuple[int, ...]] = []

    def counted(logits: Any, targets: Any) -> Any:
        passes.append((*logits.shape, *targets.shape))
        return logprob(logits, targets)

    monkeypatch.setattr(steps, "logprob", counted)
    model = ScriptedModel("abcdef", "xy")
    answers(model, [scripted(0, prompt=b"123"), scripted(1, prompt=b"12"), scripted(1, prompt=b"1234")], 2)
    sent = [rows for rows, length in model.calls if length == 1]
    assert passes == [(rows, SCRIPT_VOCAB, rows, 0) for rows in sent]


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
@pytest.mark.usefixtures("unprobed")
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
        Decoder(model).run(
            requests,
            batch_size=batch_size,
            decode=decode(),
            eos_token_ids=frozenset([SCRIPT_EOS]),
            on_generation=found.__setitem__,
        )
    assert found[0] == Generation("a", 2, "stop")
    assert 1 not in found


@pytest.mark.usefixtures("unprobed")
def test_a_row_that_gives_nan_beside_others_only_is_continued_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Overflowing("hi! and more", "a long text")
    model.in_batches_only = True
    requests = [scripted(0, stop=("mo",)), scripted(1), scripted(0, 5)]
    assert answers(model, requests, 3) == [
        Generation("hi! and ", 10, "stop"),
        Generation("a long text", 12, "stop"),
        Generation("hi! a", 5, "length"),
    ]
    assert "2 prompts gave NaN beside others" in caplog.text


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


def test_a_sampled_row_is_the_same_whatever_is_beside_it() -> None:
    model = ScriptedModel("abcdefghijkl", "mnopqrstuvwx", spread=0.1)
    sampling = Sampling(temperature=1.0, seed=5)
    one = scripted(0, 12, sampling=sampling)
    others = [scripted(1, 12, sampling=sampling.with_seed(seed)) for seed in range(4)]
    alone = answers(model, [one])[0].text
    assert answers(model, [*others, one, scripted(1, 12)], 3)[4].text == alone
    assert len({answer.text for answer in answers(model, others)}) == 4, "other seeds give other texts"


def test_half_precision_logits_are_compared_in_float32() -> None:
    """Two close logits that are equal once normalised in bfloat16: the larger one must win."""

    class Close(ScriptedModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            logits = super().__call__(inputs, cache)
            row = mx.zeros(logits.shape[-1])
            row[65], row[66] = 1.0, 1.0078125  # neighbours in bfloat16
            return (logits * 0 + row).astype(mx.bfloat16)

    (answer,) = answers(Close("x"), [scripted(0, 3)])
    assert answer.text == "BBB"


def test_a_model_that_cannot_be_decoded_in_batches_says_so_and_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unbatched(ScriptedModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            if inputs.shape[0] > 1:
                raise ValueError("no batches")
            return super().__call__(inputs, cache)

    requests = [scripted(0), scripted(1, 2, prompt=b"xy"), scripted(0, stop=("b",))]
    assert [answer.text for answer in answers(Unbatched("abc", "xyz"), requests)] == ["abc", "xy", "a"]
    assert "one at a time" in caplog.text


def test_caches_that_cannot_be_merged_are_used_as_they_are() -> None:
    """As llama4's."""
    from mlx_lm.models.cache import ChunkedKVCache

    class Chunked(ScriptedModel):
        def make_cache(self) -> list[Any]:
            return [ChunkedKVCache(64)]

    requests = [scripted(0), scripted(1, 2, prompt=b"xy"), scripted(0, stop=("b",))]
    assert [answer.text for answer in answers(Chunked("abc", "xyz"), requests)] == ["abc", "xy", "a"]
