"""The backend, rule by rule of what a right answer is, against the unbatched float64 oracle."""

from __future__ import annotations

import copy
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_eval.errors import InvalidOptionError, ModelError
from mlx_eval.harness.lm import MLXEvalLM
from tests.harness.backends import TOKENIZERS, VOCAB, Hook, backend, network, said, scripted
from tests.tiny import (
    BOS,
    EOS,
    EOT,
    SCRIPT_EOS,
    TOLERANCE,
    ScriptedModel,
    assert_scores,
    bpe_tokenizer,
    loaded,
    oracle_logprobs,
    oracle_score,
    request,
    script_tokenizer,
    tiny_model,
)

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
    assert lm.batch_size == "auto"
    assert backend(batch_size="auto:4").batch_size == "auto"
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
    assert lm._ready_decoder().decoding.together
    lm.cache_hook = hook = Hook()
    model.limit = len(model.calls) + 4
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood([request(letter * 3, "y") for letter in "abcdefgh"])
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
    assert lm.statistics.notes["longer than 3 tokens; context truncated on the left"] == 1


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
    assert list(lm.statistics.notes) == [
        "the continuation alone is longer than 3 tokens; only its last ones were scored"
    ]


def test_truncations_are_warned_of_once_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    lm = backend("plain", max_length=4)
    lm.loglikelihood([request("the quick brown fox jumps", f" {word}") for word in ("over", "the", "lazy")])
    assert [record.message for record in caplog.records if "truncated" in record.message] == [
        "3 requests: longer than 4 tokens; context truncated on the left"
    ]


def test_equal_tokens_with_another_split_are_not_mixed_up_and_run_once() -> None:
    lm = backend("plain")
    pairs = [([1, 2], [3, 4]), ([1], [2, 3, 5]), ([1, 2], [3, 4])]
    answers = lm._loglikelihood_tokens([(None, *pair) for pair in pairs])
    assert_scores(network(), pairs, answers)
    assert dict(lm.statistics.tokens) == {"naive": 9, "unique": 3, "computed": 3, "padding": 0}
    assert lm.statistics.forwards == 1
    assert lm.statistics.requests["loglikelihood"] == 3


def test_a_module_replaced_between_two_calls_counts() -> None:
    lm: Any = MLXEvalLM(loaded(tiny_model(vocab_size=VOCAB), bpe_tokenizer()))
    asked = [request("the", " quick brown")]
    before = lm.loglikelihood(asked)
    lm.loaded.model.lm_head = tiny_model(vocab_size=VOCAB, seed=1).lm_head
    after = lm.loglikelihood(asked)
    assert abs(after[0][0] - before[0][0]) > 0.1
    assert_scores(lm.loaded.model, [lm._encode_pair("the", " quick brown")], after)


def test_an_undefined_answer_is_not_remembered(caplog: pytest.LogCaptureFixture) -> None:
    damaged = tiny_model(vocab_size=VOCAB)
    table = np.array(damaged.model.embed_tokens.weight)
    table[bpe_tokenizer().encode(" quick")[0]] = math.nan
    damaged.model.embed_tokens.weight = mx.array(table)
    lm: Any = MLXEvalLM(loaded(damaged, bpe_tokenizer()))
    lm.loaded.model.lm_head.weight = mx.array(np.nan_to_num(table))
    lm.cache_hook = hook = Hook()
    lm.loglikelihood([request("the quick", " brown"), request("the", " brown")])
    assert len(hook.seen) == 1


def test_damaged_weights_are_an_error() -> None:
    damaged = tiny_model(vocab_size=VOCAB)
    damaged.model.norm.weight = mx.full((32,), math.nan)
    lm: Any = MLXEvalLM(loaded(damaged, bpe_tokenizer()))
    with pytest.raises(ModelError, match="is NaN: its weights are damaged"):
        lm.loglikelihood([request("the", " quick")])


def test_some_undefined_answers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    damaged = tiny_model(vocab_size=VOCAB)
    table = np.array(damaged.model.embed_tokens.weight)
    (quick,) = bpe_tokenizer().encode(" quick")
    table[quick] = math.nan  # only texts that hold this token
    damaged.model.embed_tokens.weight = mx.array(table)
    lm: Any = MLXEvalLM(loaded(damaged, bpe_tokenizer()))
    lm.loaded.model.lm_head.weight = mx.array(np.nan_to_num(table))
    answers = lm.loglikelihood([request("the quick", " brown"), request("the", " brown")])
    assert [math.isnan(logprob) for logprob, _ in answers] == [True, False]
    assert "1 request: the log-probability is not a number" in caplog.text


def test_ids_that_the_model_has_no_row_for_are_refused() -> None:
    """MLX would read foreign memory."""
    lm: Any = MLXEvalLM(loaded(tiny_model(vocab_size=VOCAB), bpe_tokenizer()))
    object.__setattr__(lm.loaded, "config", {**lm.loaded.config, "vocab_size": 20})
    for ask in (
        lambda: lm.loglikelihood([request("the", " quick")]),
        lambda: lm.loglikelihood_rolling([request("the quick")]),
        lambda: lm.generate_until([request("the quick", {})]),
    ):
        with pytest.raises(ModelError, match="has 20 rows in its embedding"):
            ask()
    with pytest.raises(ModelError, match="id 1000000"):
        MLXEvalLM(lm.loaded, prefix_token_id=10**6)


def test_a_window_longer_than_the_table_of_positions_is_refused() -> None:
    gpt2 = tiny_model(
        "gpt2",
        vocab_size=VOCAB,
        n_positions=16,
        n_ctx=16,
        n_embd=32,
        n_head=4,
        n_layer=2,
        layer_norm_epsilon=1e-5,
    )
    own = loaded(gpt2, bpe_tokenizer(), window=16)
    assert own.num_positions == 16
    with pytest.raises(InvalidOptionError, match="max_length=17: this model has 16 positions"):
        MLXEvalLM(own, max_length=17)


def test_a_window_longer_than_the_models_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    backend("plain", max_length=10**6)
    assert "max_length=1000000 is more than" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 1},
        {"max_length": "x"},
        {"max_length": 64.5},
        {"max_gen_toks": 0},
        {"seed": -1},
        {"batch_size": 0},
        {"batch_size": "many"},
        {"prefix_token_id": "x"},
        {"think_end_token": ""},
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidOptionError, match=name):
        backend("plain", **options)


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


def test_lm_eval_is_given_lists_of_ids() -> None:
    """It joins them with `+` and compares them."""
    lm = backend("plain")
    assert lm.tok_encode("the quick", left_truncate_len=1) == lm.tok_encode("the quick")[-1:]
    for ids in (lm.tok_encode("the quick"), *lm._encode_pair("the", " quick")):
        assert isinstance(ids, list)
        assert all(type(token) is int for token in ids)


def test_lists_and_arrays_of_ids_score_alike() -> None:
    lm = backend("plain", max_length=4)
    pairs = [([7, 8, 9, 10], [11, 12]), ([7], []), ([7], [8, 9, 10, 11, 12, 13])]
    as_lists: list[Any] = [(None, *pair) for pair in pairs]
    as_arrays: list[Any] = [(None, *(np.array(ids, dtype=np.int32) for ids in pair)) for pair in pairs]
    assert lm._loglikelihood_tokens(as_arrays) == lm._loglikelihood_tokens(as_lists)


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
