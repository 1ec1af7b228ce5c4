"""The backend, rule by rule of what a right answer is, against the unbatched float64 oracle."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlx_eval.errors import InvalidOptionError, UnknownNameError
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.bytes import byte_tokenizer
from tests.tiny import (
    BOS,
    EOS,
    EOT,
    NEAR_TIE,
    SCRIPT_EOS,
    SECOND_EOS,
    THINK_END,
    TOLERANCE,
    ScriptedModel,
    assert_scores,
    bpe_tokenizer,
    loaded,
    oracle_generate,
    oracle_logprobs,
    oracle_score,
    request,
    script_tokenizer,
    spm_tokenizer,
    tiny_model,
)

VOCAB = 340
TOKENIZERS = {
    "bos": lambda: bpe_tokenizer(adds_bos=True),
    "plain": bpe_tokenizer,
    "eos only": lambda: bpe_tokenizer(has_bos=False),
    "spm": spm_tokenizer,
}


@functools.cache
def network() -> nn.Module:
    return tiny_model(vocab_size=VOCAB)


def backend(name: str = "bos", window: int = 64, **options: Any) -> Any:
    return MLXEvalLM(loaded(network(), TOKENIZERS[name](), window=window), **options)


class Hook:
    """lm-eval's cache hook, remembering."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, Any]] = []

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        self.seen.append((kind, arguments, answer))


def scripted(*scripts: Sequence[int] | str, spread: float = 0.0, window: int = 1000, **options: Any) -> Any:
    model = ScriptedModel(*scripts, spread=spread)
    eos = options.pop("eos", SCRIPT_EOS)
    return MLXEvalLM(loaded(model, options.pop("tokenizer", script_tokenizer()), eos, window), **options)


def said(lm: Any, gen_kwargs: dict[str, Any] | None = None, prompt: str = "<|script0|>") -> str:
    (text,) = lm.generate_until([request(prompt, gen_kwargs or {})])
    assert isinstance(text, str)
    return text


# ---------------------------------------------------------------- everything


@pytest.mark.parametrize("method", ["loglikelihood", "loglikelihood_rolling", "generate_until"])
def test_an_empty_request_list_returns_an_empty_list(method: str) -> None:
    assert getattr(backend(), method)([]) == []


def test_an_instance_is_lm_evals_lm_and_template_lm() -> None:
    from lm_eval.api.model import LM, TemplateLM

    lm = backend()
    assert isinstance(lm, LM)
    assert isinstance(lm, TemplateLM)
    assert isinstance(lm, MLXEvalLM)
    assert lm.world_size == 1
    assert lm.rank == 0


def test_a_subclass_is_one_too_and_keeps_its_own_methods() -> None:
    from lm_eval.api.model import LM

    class Louder(MLXEvalLM):
        def __init__(self, *args: Any, loud: bool = True, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.loud = loud

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [text.upper() for text in super().generate_until(requests, disable_tqdm)]

    lm: Any = Louder(loaded(ScriptedModel("abc"), script_tokenizer()), loud=False)
    assert isinstance(lm, LM)
    assert isinstance(lm, Louder)
    assert not lm.loud
    assert said(lm) == "ABC"


def test_what_lm_eval_passes_to_every_model_is_accepted() -> None:
    lm = backend(device="cuda:0", max_batch_size=64, batch_size="auto")
    assert lm.batch_size == 8
    assert backend(batch_size="auto:4").batch_size == 8
    assert backend(batch_size="3").batch_size == 3


@pytest.mark.parametrize("batch_size", [0, -1, "many", "1.5"])
def test_a_batch_size_that_is_none_is_named(batch_size: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"batch_size={batch_size!r}|batch_size={batch_size}"):
        backend(batch_size=batch_size)


def test_a_window_without_room_is_named() -> None:
    with pytest.raises(InvalidOptionError, match="max_length=1"):
        backend(max_length=1)


def test_a_model_and_a_tokenizer_of_ones_own() -> None:
    lm: Any = MLXEvalLM(network(), bpe_tokenizer())
    assert lm.max_length == 64
    assert lm.loglikelihood([request("the", " quick")])[0][0] < 0
    with pytest.raises(InvalidOptionError, match="needs its tokenizer"):
        MLXEvalLM(network())
    with pytest.raises(InvalidOptionError, match="model is a str"):
        MLXEvalLM("demo")  # type: ignore[arg-type]


def test_cache_hook_is_told_each_answer_once_with_the_original_arguments() -> None:
    lm = backend(max_length=12)
    lm.cache_hook = hook = Hook()
    pairs = [
        ("", " quick"),
        ("the ", "quick"),
        ("Ans", "wer"),
        ("the", ""),
        ("the quick " * 9, "brown"),
        ("", " quick"),
    ]
    answers = lm.loglikelihood([request(*pair) for pair in pairs])
    key = str
    assert sorted(hook.seen, key=key) == sorted(
        (("loglikelihood", pair, answer) for pair, answer in zip(pairs, answers, strict=True)), key=key
    )
    hook.seen.clear()
    texts = ["", "the quick", "the quick brown fox " * 8, "the quick"]
    totals = lm.loglikelihood_rolling([request(text) for text in texts])
    assert sorted(hook.seen, key=key) == sorted(
        (("loglikelihood_rolling", (text,), total) for text, total in zip(texts, totals, strict=True)),
        key=key,
    )
    hook.seen.clear()
    asked = [
        ("the", {"until": ["x"], "max_gen_toks": 3}),
        ("", {}),
        ("the", {"until": ["x"], "max_gen_toks": 3}),
    ]
    written = lm.generate_until([request(*one) for one in asked])
    assert sorted(hook.seen, key=key) == sorted(
        (("generate_until", one, text) for one, text in zip(asked, written, strict=True)), key=key
    )


def test_cache_hook_is_told_before_the_run_ends() -> None:
    """So that what was computed before an interruption is not computed again."""

    class Interrupted(ScriptedModel):
        limit = 10**9

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if len(self.calls) >= self.limit:
                raise KeyboardInterrupt
            return super().__call__(inputs, cache)

    model = Interrupted("abc")
    lm: Any = MLXEvalLM(loaded(model, script_tokenizer(), SCRIPT_EOS, 1000), batch_size=1)
    lm.loglikelihood([request("x", "y")])  # the head is looked for once
    lm.cache_hook = hook = Hook()
    model.limit = len(model.calls) + 4
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood([request("x" * place, "y") for place in range(1, 9)])
    assert 2 <= len(hook.seen) <= 4
    hook.seen.clear()
    model.limit = len(model.calls) + 12
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until([request("x" * place + "<|script0|>", {}) for place in range(1, 9)])
    assert len(hook.seen) >= 1
    assert {answer for _, _, answer in hook.seen} == {"abc"}


def test_the_arguments_of_a_request_are_left_as_they_are() -> None:
    gen_kwargs = {"until": ["\n"], "max_gen_toks": 2, "do_sample": False}
    before = copy.deepcopy(gen_kwargs)
    said(scripted("ab"), gen_kwargs)
    assert gen_kwargs == before


# ---------------------------------------------------------------- log-likelihood

PAIRS = [
    ("the quick", " brown"),
    ("the quick ", "brown"),
    ("the quick \n", "brown"),
    ("Ans", "wer"),
    ("", "the"),
    ("", " the quick"),
    ("   ", "the"),
    ("\n\n", " the"),
    ("Question: what is the answer? Answer:", " 42"),
    ("a", "é😀"),
    ("é"[:1], "😀 the lazy dog."),
    ("the quick", " brown"),
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_every_kind_of_pair_scores_as_the_oracle(name: str, batch_size: int) -> None:
    """Empty, whitespace-only and ordinary contexts, moved spaces, joined tokens, duplicates."""
    lm = backend(name, batch_size=batch_size)
    answers = lm.loglikelihood([request(*pair) for pair in PAIRS])
    assert_scores(network(), [lm._encode_pair(*pair) for pair in PAIRS], answers)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_pairs_in_any_order_and_batch_size(data: st.DataObject) -> None:
    text = st.text(st.sampled_from("the quick Answer é😀\n "), max_size=14)
    pairs = data.draw(st.lists(st.tuples(text, text.filter(bool)), min_size=1, max_size=6))
    lm = backend(data.draw(st.sampled_from(sorted(TOKENIZERS))), batch_size=data.draw(st.integers(1, 5)))
    order = data.draw(st.permutations(range(len(pairs))))
    answers = lm.loglikelihood([request(*pairs[index]) for index in order])
    encoded = [lm._encode_pair(*pairs[index]) for index in order]
    scored = [(pair, answer) for pair, answer in zip(encoded, answers, strict=True) if pair[1]]
    assert_scores(network(), [pair for pair, _ in scored], [answer for _, answer in scored])


def test_an_empty_context_is_the_prefix_token() -> None:
    lm = backend("plain")
    (bos,) = lm.tok_encode(BOS)
    assert lm._encode_pair("", " quick") == ([bos], lm.tok_encode(" quick"))
    assert lm.loglikelihood([request("", " quick")])[0][0] == pytest.approx(
        oracle_score(network(), [bos], lm.tok_encode(" quick"))[0], abs=TOLERANCE
    )


def test_a_continuation_that_starts_with_the_prefix_token_has_it_as_its_context() -> None:
    lm = backend("plain")
    (bos,) = lm.tok_encode(BOS)
    rest = lm.tok_encode(" quick")
    (answer,) = lm.loglikelihood([request("", f"{BOS} quick")])
    assert_scores(network(), [([bos], rest)], [answer])


def test_an_empty_continuation_is_certain_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    lm = backend("plain")
    assert (
        lm.loglikelihood([request("the quick", ""), request("", ""), request("", BOS)]) == [(0.0, True)] * 3
    )
    assert lm.statistics.notes["the continuation has no tokens; scored 0"] == 3
    assert "3 requests: the continuation has no tokens" in caplog.text


def test_a_token_that_spans_the_join_scores_the_continuation_alone_and_is_counted() -> None:
    lm = backend("plain")
    assert len(lm.tok_encode("Answer")) == 1
    pair = lm._encode_pair("Ans", "wer")
    assert pair == (lm.tok_encode("Ans"), lm.tok_encode("wer"))
    assert_scores(network(), [pair], lm.loglikelihood([request("Ans", "wer")]))
    assert [count for text, count in lm.statistics.notes.items() if "one token spans" in text] == [1]


def test_truncation_keeps_the_right_end_of_the_context_and_all_of_the_continuation() -> None:
    """Context abc, continuation de, three positions: score de given bc."""
    lm = backend("plain", max_length=3)
    ids = {character: lm.tok_encode(character)[0] for character in "abcde"}
    (answer,) = lm._loglikelihood_tokens([(None, [ids[c] for c in "abc"], [ids[c] for c in "de"])])
    assert_scores(network(), [([ids["b"], ids["c"]], [ids["d"], ids["e"]])], [answer])
    assert lm.statistics.notes["longer than 3 tokens; truncated on the left"] == 1


def test_a_pair_that_just_fits_is_not_truncated() -> None:
    lm = backend("plain", max_length=4)
    pair = ([7, 8, 9], [10, 11])
    answers = lm._loglikelihood_tokens([(None, *pair)])
    assert_scores(network(), [pair], answers)
    assert not lm.statistics.notes


def test_a_continuation_longer_than_the_window_scores_its_last_tokens() -> None:
    lm = backend("plain", max_length=3)
    (answer,) = lm._loglikelihood_tokens([(None, [7, 8], [10, 11, 12, 13, 14])])
    assert_scores(network(), [([11], [12, 13, 14])], [answer])


def test_truncations_are_warned_of_once_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    lm = backend("plain", max_length=4)
    lm.loglikelihood([request("the quick brown fox jumps", f" {word}") for word in ("over", "the", "lazy")])
    assert [record.message for record in caplog.records if "truncated" in record.message] == [
        "3 requests: longer than 4 tokens; truncated on the left"
    ]


def test_equal_tokens_with_another_split_are_not_mixed_up_and_run_once() -> None:
    lm = backend("plain")
    pairs = [([1, 2], [3, 4]), ([1], [2, 3, 5]), ([1, 2], [3, 4])]
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in pairs])
    assert_scores(network(), pairs, answers)
    assert dict(lm.statistics.tokens) == {"naive": 9, "computed": 3, "padding": 0}
    assert lm.statistics.forwards == 1
    assert lm.statistics.requests["loglikelihood"] == 3


def test_damaged_weights_are_named(caplog: pytest.LogCaptureFixture) -> None:
    damaged = tiny_model(vocab_size=VOCAB)
    damaged.model.norm.weight = mx.full((32,), math.nan)
    lm: Any = MLXEvalLM(loaded(damaged, bpe_tokenizer()))
    assert math.isnan(lm.loglikelihood([request("the", " quick")])[0][0])
    assert "1 request: the log-probability is not a number" in caplog.text


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize("name", ["bos", "plain"])
def test_bos_exactly_once_in_log_likelihoods(name: str) -> None:
    """Added where the tokenizer adds one, and not doubled where the text begins with it already."""
    lm = backend(name)
    (bos,) = bpe_tokenizer().encode(BOS)
    context, _ = lm._encode_pair("the quick", " brown")
    written, continuation = lm._encode_pair(f"{BOS}the quick", " brown")
    assert context.count(bos) == (name == "bos")
    assert written.count(bos) == 1
    assert written[0] == bos
    assert continuation == lm.tok_encode(" brown", add_special_tokens=False)


def test_add_bos_token_is_obeyed_against_the_tokenizer() -> None:
    (bos,) = bpe_tokenizer().encode(BOS)
    assert backend("plain", add_bos_token=True).tok_encode("the")[0] == bos
    assert backend("plain", add_bos_token=True).tok_encode(f"{BOS}the").count(bos) == 1
    assert bos not in backend("bos", add_bos_token=False).tok_encode("the")
    with pytest.raises(InvalidOptionError, match="add_bos_token"):
        backend("eos only", add_bos_token=True)


def test_bos_is_not_doubled_when_another_prefix_token_is_given() -> None:
    """A chat template writes BOS, whatever stands for an empty context."""
    lm = backend("bos", prefix_token_id=77)
    (bos,) = bpe_tokenizer().encode(BOS)
    assert lm.tok_encode(f"{BOS}the").count(bos) == 1
    assert lm.tok_encode("the").count(bos) == 1


def test_the_prefix_token_is_bos_else_eos_else_as_given() -> None:
    assert backend("plain").prefix_token_id == bpe_tokenizer().bos_token_id
    assert backend("eos only").prefix_token_id == bpe_tokenizer(has_bos=False).eos_token_id
    lm = backend("plain", prefix_token_id=77)
    assert lm._encode_pair("", " quick")[0] == [77]
    bare = copy.deepcopy(bpe_tokenizer(has_bos=False))
    bare.eos_token = None
    with pytest.raises(InvalidOptionError, match="give prefix_token_id"):
        MLXEvalLM(loaded(network(), bare))


# ---------------------------------------------------------------- rolling


def rolling_oracle(lm: Any, text: str, window: int) -> tuple[float, int]:
    """Each token of the text predicted once, in windows written out by hand; and how many tokens."""
    prefix = lm.prefix_token_id
    ids = lm.tok_encode(text, add_special_tokens=False)
    total, place = 0.0, 0
    while place < len(ids):
        count = min(window, len(ids) - place)
        end = place + count
        # a full window of input ends before its last target; the first begins with the prefix token
        inputs = [prefix, *ids][max(0, end - window) : end]
        logprobs = oracle_logprobs(network(), inputs)
        total += sum(logprobs[len(inputs) - count + k, ids[place + k]] for k in range(count))
        place = end
    return total, len(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("length", [1, 2, 5, 8, 9, 16, 17, 40])
def test_each_token_is_predicted_once_the_first_from_the_prefix(name: str, length: int) -> None:
    """Prefix token once, whether the tokenizer adds BOS or not; windows as lm-eval cuts them."""
    lm = backend(name, max_length=8)
    text = "the quick brown fox jumps over the lazy dog. " * 5
    ids = lm.tok_encode(text, add_special_tokens=False)[:length]
    text = lm.tok_decode(ids)
    (total,) = lm.loglikelihood_rolling([request(text)])
    expected, count = rolling_oracle(lm, text, 8)
    assert total == pytest.approx(expected, abs=TOLERANCE)
    assert lm.count_rolling_tokens(text) == count


@pytest.mark.parametrize("name", ["bos", "plain"])
def test_a_text_that_begins_with_bos_has_it_once_in_rolling(name: str) -> None:
    lm = backend(name)
    plain, written = lm.loglikelihood_rolling([request("the quick"), request(f"{BOS}the quick")])
    assert plain == pytest.approx(written, abs=TOLERANCE)


def test_a_document_alone_is_the_document_among_others() -> None:
    texts = ["the quick brown fox " * 6, "a", "Answer: 42. " * 9, "", "é😀"]
    lm = backend(max_length=8, batch_size=3)
    together = lm.loglikelihood_rolling([request(text) for text in texts])
    for text, total in zip(texts, together, strict=True):
        assert lm.loglikelihood_rolling([request(text)])[0] == pytest.approx(total, abs=TOLERANCE)
        assert total == pytest.approx(rolling_oracle(lm, text, 8)[0], abs=TOLERANCE)


def test_windows_of_all_documents_share_batches() -> None:
    lm = backend(max_length=8, batch_size=4)
    texts = ["what the quick brown fox answers " * 4, "Question: 42 jumps over 42. " * 3]
    lm.loglikelihood_rolling([request(text) for text in texts])
    windows = sum(len(lm._encoder.rolling_windows(text, 8)) for text in texts)
    assert windows > len(texts)
    assert lm.statistics.forwards == math.ceil(windows / 4)


def test_an_empty_text_scores_zero_and_is_counted() -> None:
    lm = backend()
    assert lm.loglikelihood_rolling([request("")]) == [0.0]
    assert lm.statistics.notes["the text has no tokens; scored 0"] == 1


# ---------------------------------------------------------------- generation

UNTIL = [
    ("string", {"until": "wo"}, "hello "),
    ("one", {"until": ["wo"]}, "hello "),
    ("first of several", {"until": ["wo", "l"]}, "he"),
    ("empty list", {"until": []}, "hello world"),
    ("none", {"until": None}, "hello world"),
    ("absent", {}, "hello world"),
    ("empty text ignored", {"until": ["", "wo"]}, "hello "),
    ("only empty text", {"until": [""]}, "hello world"),
    ("empty string", {"until": ""}, "hello world"),
    ("whitespace", {"until": [" "]}, "hello"),
]


@pytest.mark.parametrize(
    ("gen_kwargs", "text"), [case[1:] for case in UNTIL], ids=[case[0] for case in UNTIL]
)
def test_until_in_every_form(gen_kwargs: dict[str, Any], text: str) -> None:
    assert said(scripted("hello world"), gen_kwargs) == text


@pytest.mark.parametrize("batch_size", [1, 2, 4, 20])
def test_each_request_keeps_its_own_until_in_a_mixed_batch(batch_size: int) -> None:
    lm = scripted("hello world", batch_size=batch_size)
    asked = [request("x" * place + "<|script0|>", case[1]) for place, case in enumerate(UNTIL)]
    assert lm.generate_until(asked) == [case[2] for case in UNTIL]


def test_until_lists_that_lm_evals_collator_confuses_are_kept_apart() -> None:
    lm = scripted("a\nb\n\nc")
    asked = [request("<|script0|>", {"until": until}) for until in ("\n\n", ["\n", "\n"])]
    assert lm.generate_until(asked) == ["a\nb", "a"]


def test_a_stop_split_over_tokens_inside_a_token_and_spelled_otherwise() -> None:
    """The model's text ` quick brown` in any tokenisation; the stop's own tokens never appear."""
    tokenizer = bpe_tokenizer()

    class Replay(ScriptedModel):
        """Says what follows the prompt's last token in a fixed chain of distinct ids."""

        def __init__(self, ids: list[int]) -> None:
            super().__init__("")
            self.next = dict(zip([0, *ids], [*ids, tokenizer.eos_token_id], strict=True))

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if cache is not None:
                states = inputs.astype(mx.float32)[:, None, :, None]
                cache[0].update_and_fetch(states, states)
            chosen = mx.array([[self.next.get(token, 0) for token in row] for row in inputs.tolist()])
            return (mx.arange(len(tokenizer)) == chosen[..., None]) * 20.0

    for pieces in (["Answer"], ["An", "sw", "er"], ["A", "n", "s", "w", "e", "r"]):
        ids = [piece for text in pieces for piece in tokenizer.encode(text)]
        lm: Any = MLXEvalLM(loaded(Replay(ids), tokenizer))
        assert said(lm, {"until": ["swe"], "max_gen_toks": 20}, tokenizer.decode([0])) == "An"


def test_a_stop_in_the_prompt_does_not_count() -> None:
    assert said(scripted("hello\nworld"), {"until": ["Q:"]}, "Q: stop Q:<|script0|>") == "hello\nworld"


def test_end_of_sequence_stops_and_every_id_of_the_generation_config_too() -> None:
    assert said(scripted([*b"ab", SCRIPT_EOS, *b"cd"])) == "ab"
    assert said(scripted([*b"ab", SECOND_EOS, *b"cd"], eos=[SCRIPT_EOS, SECOND_EOS])) == "ab"
    assert said(scripted([*b"ab", SECOND_EOS, *b"cd"])) == "abcd"


def test_the_text_of_the_end_of_sequence_token_stops_too() -> None:
    """As in lm-eval's hf backend, when a model spells it with other tokens."""
    assert said(scripted("ab<|eos|>cd")) == "ab"


def test_special_tokens_are_skipped_and_split_characters_whole() -> None:
    assert said(scripted([*"é".encode(), SECOND_EOS, *"😀!".encode()])) == "é😀!"


def test_max_gen_toks_defaults_to_256_and_has_its_aliases() -> None:
    lm = scripted("a" * 300)
    assert len(said(lm)) == 256
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert said(lm, {name: 3}) == "aaa"
    assert said(lm, {"max_tokens": 9, "max_gen_toks": 2}) == "aa"
    assert len(said(scripted("a" * 300, max_gen_toks=7))) == 7


def test_unknown_generation_arguments_are_named() -> None:
    with pytest.raises(UnknownNameError, match="'temprature'; did you mean temperature"):
        said(scripted("ab"), {"temprature": 1.0})


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_greedy_texts_are_the_oracles(name: str, batch_size: int) -> None:
    lm = backend(name, batch_size=batch_size)
    prompts = ["the quick", "Question: what is the answer?", "", "é", "Answer", "the lazy dog. " * 3]
    asked = [request(prompt, {"max_gen_toks": 10}) for prompt in prompts]
    for prompt, text in zip(prompts, lm.generate_until(asked), strict=True):
        ids = lm.tok_encode(prompt) or [lm.prefix_token_id]
        expected, margin = oracle_generate(network(), ids, 10, [lm.eot_token_id])
        assert margin > NEAR_TIE, "choose another seed: the oracle itself is not sure"
        assert text == lm.tok_decode(expected)


def test_equal_greedy_requests_are_computed_once_and_answered_each() -> None:
    lm = scripted("abc")
    assert lm.generate_until([request("<|script0|>", {})] * 5) == ["abc"] * 5
    assert lm.statistics.tokens["generated"] == 4
    assert lm.statistics.requests["generate_until"] == 5


@pytest.mark.parametrize("name", ["bos", "plain"])
def test_bos_exactly_once_in_prompts(name: str) -> None:
    lm = backend(name)
    (bos,) = bpe_tokenizer().encode(BOS)
    first, written, empty = (
        asked.prompt_ids for asked in lm._generation_requests([("the", {}), (f"{BOS}the", {}), ("", {})])
    )
    assert first.count(bos) == (name == "bos")
    assert written.count(bos) == 1
    assert empty == (bos,)


def limits(lm: Any, length: int, max_gen_toks: int) -> tuple[tuple[int, ...], int]:
    (asked,) = lm._generation_requests([("abcdefghij"[:length], {"max_gen_toks": max_gen_toks})])
    return asked.prompt_ids, asked.max_tokens


def test_prompts_are_truncated_on_their_left_and_never_empty() -> None:
    """Only max_gen_toks as large as the window is shrunk; prompt and answer always fit."""
    lm = scripted("x", window=8)
    assert limits(lm, 5, 3) == (tuple(b"abcde"), 3)
    assert limits(lm, 6, 3) == (tuple(b"bcdef"), 3)
    assert limits(lm, 10, 7) == (tuple(b"j"), 7)
    assert lm.statistics.notes == {"the prompt and its answer do not fit; prompt truncated on the left": 2}
    assert limits(lm, 3, 8) == (tuple(b"abc"), 5)
    assert limits(lm, 10, 8) == (tuple(b"ghij"), 4)
    assert limits(lm, 10, 100) == (tuple(b"ghij"), 4)
    assert lm.statistics.notes["max_gen_toks is as large as the window; the answer's limit was lowered"] == 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.integers(1, 30), st.integers(2, 12))
def test_prompt_and_answer_always_fit(length: int, max_gen_toks: int, window: int) -> None:
    lm = scripted("x", window=window)
    prompt, limit = limits(lm, length, max_gen_toks)
    assert len(prompt) >= 1
    assert limit >= 1
    assert len(prompt) + limit <= window
    assert limit == max_gen_toks or max_gen_toks >= window
    assert b"abcdefghij"[:length].endswith(bytes(prompt))


# ---------------------------------------------------------------- sampling

SAMPLED = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}


def test_sampling_is_reproducible_per_request_whatever_the_batch() -> None:
    def texts(batch_size: int, prompts: Sequence[str]) -> dict[str, str]:
        lm = scripted("abcdefghijkl", spread=0.1, batch_size=batch_size)
        found = lm.generate_until([request(f"{prompt}<|script0|>", SAMPLED) for prompt in prompts])
        return dict(zip(prompts, found, strict=True))

    whole = texts(4, ["a", "bb", "ccc", "dddd"])
    assert texts(1, ["dddd", "a", "ccc", "bb"]) == whole
    assert texts(3, ["bb"]) == {"bb": whole["bb"]}
    assert whole["a"] != "abcdefghijkl"


def test_repeats_differ_and_are_reproducible() -> None:
    def texts() -> list[str]:
        lm = scripted("abcdefghijkl", spread=0.1)
        found: list[str] = lm.generate_until([request("<|script0|>", SAMPLED)] * 4)
        return found

    assert len(set(texts())) == 4
    assert texts() == texts()


def test_the_seed_of_the_run_and_of_the_request_are_obeyed() -> None:
    lm = scripted("abcdefghijkl", spread=0.1)
    first = said(lm, SAMPLED)
    assert said(scripted("abcdefghijkl", spread=0.1, seed=7), SAMPLED) != first
    assert said(lm, {**SAMPLED, "seed": 7}) == said(scripted("abcdefghijkl", spread=0.1, seed=7), SAMPLED)


@pytest.mark.parametrize(
    "greedy",
    [
        {},
        {"do_sample": False},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True, "temperature": 0.0},
    ],
)
def test_what_is_greedy(greedy: dict[str, Any]) -> None:
    assert said(scripted("abcdefghijkl", spread=0.1), {**greedy, "max_gen_toks": 12}) == "abcdefghijkl"


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_top_k_top_p_and_min_p_reach_the_sampler(narrow: dict[str, Any]) -> None:
    """Each so narrow that only the best token is left."""
    assert said(scripted("abcdefghijkl", spread=0.1), {**SAMPLED, **narrow}) == "abcdefghijkl"


# ---------------------------------------------------------------- thinking


def thinking_tokenizer(special: bool) -> Any:
    """Bytes with `<think>` and `</think>` as tokens, written out when decoded or not."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    base = byte_tokenizer(eos_token_id=256, vocab_size=257)
    backend_tokenizer = base.backend_tokenizer
    names = ["<think>", "</think>", "<|filler0|>", "<|filler1|>", *[f"<|script{k}|>" for k in range(16)]]
    backend_tokenizer.add_tokens(
        [AddedToken(name, special=special or "script" in name, normalized=False) for name in names]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend_tokenizer, eos_token="<|eos|>", clean_up_tokenization_spaces=False
    )


THOUGHT, THOUGHT_END = 257, 258
"""Ids of `<think>` and `</think>` in `thinking_tokenizer`."""


@pytest.mark.parametrize("special", [False, True])
def test_a_thinking_section_is_removed_and_stops_inside_it_do_not_count(special: bool) -> None:
    """Whether `<think>` is written out when decoded (Qwen3) or is a special token that is left out."""
    tokenizer = thinking_tokenizer(special)
    assert tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|script0|>"]) == [257, 258, 261]
    script = [THOUGHT, *b"one\n\ntwo", THOUGHT_END, *b"\n\nyes\n\nno"]
    lm = scripted(
        script,
        [*b"one\n\ntwo", THOUGHT_END, *b"yes\n\nno"],
        [THOUGHT, *b"one\n"],
        tokenizer=tokenizer,
        eos=256,
    )
    assert said(lm, {"until": ["no"]}) == "yes\n\n"
    assert said(lm, {"until": ["s\n"]}) == "ye"
    assert said(lm, {"until": ["\n"], "max_gen_toks": 4}, "<|script2|>") == ""
    assert lm.statistics.notes["the token limit came inside the thinking section; the answer is empty"] == 1


@pytest.mark.parametrize("special", [False, True])
def test_a_section_opened_by_the_prompt(special: bool) -> None:
    tokenizer = thinking_tokenizer(special)
    lm = scripted([THOUGHT, *b"\none\n\ntwo", THOUGHT_END, *b"yes\nno"], tokenizer=tokenizer, eos=256)
    assert said(lm, {"until": ["\n"]}, "<|script0|><think>") == "yes"
    assert said(lm, {"until": ["\n"]}, "<|script0|><think>\n") == "yes"
    assert said(lm, {"until": ["\n"], "max_gen_toks": 3}, "<|script0|><think>\n") == ""


def test_a_model_that_can_think_and_does_not() -> None:
    lm = scripted("yes\nno", tokenizer=thinking_tokenizer(False), eos=256)
    assert said(lm, {"until": ["\n"]}) == "yes"


@pytest.mark.parametrize("end", ["DONE", "<|endthink|>", THINK_END, str(THINK_END)])
def test_the_users_think_end_token_as_text_and_as_id(end: str | int) -> None:
    closing = list(b"DONE") if end == "DONE" else [THINK_END]
    lm = scripted([*b"one\ntwo", *closing, *b" yes\nno"], think_end_token=end)
    assert said(lm, {"until": ["\n"]}) == "yes"


def test_the_users_think_end_token_that_never_comes() -> None:
    lm = scripted("one\ntwo", think_end_token="DONE")
    assert said(lm, {"until": ["\n"]}) == ""


# ---------------------------------------------------------------- names for lm-eval's request cache


def chatty(template: str | dict[str, str] | None) -> Any:
    tokenizer = copy.deepcopy(bpe_tokenizer())
    tokenizer.chat_template = template
    return loaded(network(), tokenizer)


def test_tokenizer_name_changes_with_the_template_and_its_arguments() -> None:
    names = [
        MLXEvalLM(chatty("a")).tokenizer_name,
        MLXEvalLM(chatty("b")).tokenizer_name,
        MLXEvalLM(chatty(None)).tokenizer_name,
        MLXEvalLM(chatty("a"), enable_thinking=True).tokenizer_name,
        MLXEvalLM(chatty("a"), enable_thinking=False).tokenizer_name,
        MLXEvalLM(chatty("a"), chat_template_args={"date": "today"}).tokenizer_name,
    ]
    assert len(set(names)) == len(names)
    assert MLXEvalLM(chatty("a")).tokenizer_name == names[0]
    assert all("/" not in name for name in names)


def test_tokenizer_name_changes_with_the_chosen_template() -> None:
    lm = MLXEvalLM(chatty({"default": "a", "tool": "b"}))
    before = lm.tokenizer_name
    lm.chat_template("tool")
    assert lm.tokenizer_name != before


def test_what_lm_eval_asks_about_the_model() -> None:
    lm = backend()
    info = lm.get_model_info()
    assert info["model_num_parameters"] == lm.loaded.num_parameters > 0
    assert info["model_dtype"] == "float32"
    assert info["model_fingerprint"] == lm.loaded.fingerprint()
    assert lm.eot_token_id == lm.tok_encode(EOS, add_special_tokens=False)[0]
    assert lm.tok_decode(lm.tok_encode(f"the{EOT}")) == "the"
