from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlx_eval import config
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.stops import Thinking
from mlx_eval.harness.encoding import Encoder
from mlx_eval.records import Generation, GenerationRequest, Sampling
from tests.tiny import (
    FIRST_SCRIPT,
    NEAR_TIE,
    RECURRENT,
    SCRIPT_EOS,
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


def scripted(script: int, max_tokens: int = 50, prompt: Sequence[int] = (), **kw: Any) -> GenerationRequest:
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
    assert sum(rows for rows, steps in model.calls if steps == 1) == 2 * 4
    assert [answer.num_tokens for answer in found] == [3, 3]


@pytest.mark.usefixtures("unprobed")
def test_rows_that_end_make_room_for_those_that_wait() -> None:
    model = ScriptedModel("a" * 12, "b")
    requests = [scripted(0, prompt=b"xx"), *[scripted(1, prompt=b"x")] * 5]
    counted: list[int] = []
    answers(model, requests, 2, on_tokens=counted.append)
    assert max(rows for rows, _ in model.calls) == 2
    assert sum(counted) == (3 + 13) + 5 * (2 + 2)  # prompts are counted with their first answer token
    # the short rows run beside the long one, not after it
    assert sum(1 for rows, steps in model.calls if steps == 1 and rows == 2) >= 5


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
            import mlx.core as mx

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
