"""The option `low_memory_head` of the backend."""

from __future__ import annotations

from typing import Any

import pytest
from mlx import nn

from mlx_eval.errors import InvalidOptionError
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.head import RowHead
from tests.harness.backends import VOCAB, backend, network
from tests.tiny import assert_scores, bpe_tokenizer, loaded, request, tiny_model

PAIRS = [("the quick", " brown"), ("", "the"), ("Question: what is the answer? Answer:", " 42"), ("a", "é😀")]
CAPPED = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}


def test_both_kinds_of_requests_are_scored_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, default = backend(low_memory_head=True), backend()
    texts = [request("the quick brown fox " * 9), request("the")]
    wanted = default.loglikelihood_rolling(texts)
    lm.loglikelihood([request("a", "b")])  # the self-test has logits

    def logits(*_: Any) -> Any:
        raise AssertionError("the head was asked for logits")

    monkeypatch.setattr(RowHead, "logits", logits)
    answers = lm.loglikelihood([request(*pair) for pair in PAIRS])
    assert_scores(network(), [lm._encode_pair(*pair) for pair in PAIRS], answers)
    # of a few hundred tokens, each scored to some 1e-6 nats
    assert lm.loglikelihood_rolling(texts) == pytest.approx(wanted, abs=1e-3)


def test_answers_are_written_as_without_it() -> None:
    asked = [request("the quick", {"max_gen_toks": 5, "until": ["x"]})]
    assert backend(low_memory_head=True).generate_until(asked) == backend().generate_until(asked)


def test_a_model_that_caps_its_logits_is_refused_before_anything_is_computed() -> None:
    model = loaded(tiny_model("gemma2", VOCAB, **CAPPED), bpe_tokenizer())
    with pytest.raises(InvalidOptionError, match="run without low_memory_head"):
        MLXEvalLM(model, low_memory_head=True)
    MLXEvalLM(model)


def test_weights_that_are_replaced_are_found_again() -> None:
    model = tiny_model(vocab_size=VOCAB)
    lm: Any = MLXEvalLM(loaded(model, bpe_tokenizer()), low_memory_head=True)
    lm.loglikelihood([request("a", "b")])
    nn.quantize(model, group_size=32, bits=8)
    answers = lm.loglikelihood([request(*pair) for pair in PAIRS])
    assert_scores(model, [lm._encode_pair(*pair) for pair in PAIRS], answers)


@pytest.mark.parametrize("value", ["maybe", "no", 2, None, ""])
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    """As lm-eval's `--model_args` would bring it."""
    with pytest.raises(InvalidOptionError, match=r"low_memory_head=.*: give true or false"):
        backend(low_memory_head=value)


@pytest.mark.parametrize(("value", "means"), [("true", True), (1, True), ("False", False), ("0", False)])
def test_texts_that_spell_it_are_taken(value: Any, means: bool) -> None:
    assert backend(low_memory_head=value)._low_memory_head is means
