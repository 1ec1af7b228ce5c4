"""The same weights, the same token ids, the same numbers as lm-eval's Hugging Face backend.

Tiny random transformers models in float32, written to a directory and read back by us. Within 1e-4 nats:
both were within 1e-5 a token of float64, and no continuation here has ten tokens. Gemma and NeoX take the form of
GELU that mlx-lm computes (tests/models/tiny_transformers.py); mlx_eval/models/differences.py lists the other forms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.load import load_model
from tests.models.tiny_transformers import tiny
from tests.tiny import BOS, NEAR_TIE, TOLERANCE, bpe_tokenizer, oracle_generate, oracle_score, request

pytest.importorskip("torch")

ARCHITECTURES = ("llama", "qwen2", "gemma", "gpt2", "gpt_neox")
TOKENIZERS = {
    "adds bos": lambda: bpe_tokenizer(adds_bos=True),
    "has bos": bpe_tokenizer,
    "eos only": lambda: bpe_tokenizer(has_bos=False),
}
PAIRS = [
    ("the quick", " brown"),
    ("the quick ", "brown"),
    ("the quick\n\n ", "brown fox"),
    ("", "the"),
    ("", " Answer: é😀"),
    ("Question: what is the answer? Answer:", " 42"),
    ("Question: what is the answer? Answer:", " the lazy dog."),
    ("Question: what is the answer? Answer:", " fox"),
    ("a", "bé"),
    ("the answer ", ""),
    ("the quick brown fox jumps over the lazy dog. " * 12, " Answer"),
    (f"{BOS}the quick", " brown"),
    ("the quick", " brown"),
]
TEXTS = ["the quick brown fox.", "é", "Answer: the quick brown fox jumps over the lazy dog. 42? " * 8]
PROMPTS = [
    ("the quick", {"until": ["\n\n"], "max_gen_toks": 12}),
    ("Question: what is the answer?", {"until": ["e"], "max_gen_toks": 12}),
    ("a", {"max_gen_toks": 5, "do_sample": False}),
    ("the quick brown fox jumps over the lazy dog. " * 12, {"until": "fox", "max_gen_toks": 8}),
    (f"{BOS}Answer:", {"until": [], "max_gen_toks": 12}),
]


class Backends(NamedTuple):
    name: str
    ours: Any
    theirs: Any


@pytest.fixture(
    scope="module",
    params=[(a, t) for a in ARCHITECTURES for t in ("adds bos", "has bos")] + [("gpt2", "eos only")],
    ids="-".join,
)
def backends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backends:
    from lm_eval.models.huggingface import HFLM

    architecture, name = request.param
    tokenizer = TOKENIZERS[name]()
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }
    model = tiny(architecture, vocab_size=330, **ids)
    directory: Path = tmp_path_factory.mktemp("model")
    model.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    ours = MLXEvalLM(load_model(directory, dtype="float32"), batch_size=3)
    # its tokenizer from the directory too: transformers' class for an architecture may split texts its own way
    theirs = HFLM(pretrained=model, tokenizer=str(directory), device="cpu", batch_size=3, backend="causal")
    return Backends(name, ours, theirs)


def test_what_is_said_of_the_model_is_the_same(backends: Backends) -> None:
    _, ours, theirs = backends
    assert ours.max_length == theirs.max_length == 128
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id
    assert ours.max_gen_toks == theirs.max_gen_toks


def test_token_ids_are_the_same(backends: Backends) -> None:
    _, ours, theirs = backends
    for context, continuation in PAIRS:
        if context:
            assert ours._encode_pair(context, continuation) == theirs._encode_pair(context, continuation)
    for text in TEXTS:
        assert ours.tok_encode(text) == theirs.tok_encode(text)


def test_log_likelihoods_are_the_same(backends: Backends) -> None:
    _, ours, theirs = backends
    asked = [request(*pair) for pair in PAIRS]
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    for pair, (logprob, greedy), (own_logprob, own_greedy) in zip(
        PAIRS, expected, ours.loglikelihood(asked), strict=True
    ):
        assert own_logprob == pytest.approx(logprob, abs=TOLERANCE), pair
        context, continuation = ours._encode_pair(*pair)
        window = [*context, *continuation][-129:]
        margin = oracle_score(ours.loaded.model, window[: -len(continuation)], continuation)[2]
        assert own_greedy == greedy or margin < NEAR_TIE, pair


def test_rolling_log_likelihoods_are_the_same(backends: Backends) -> None:
    """But for this: where the tokenizer adds BOS, theirs predicts it from the prefix, a second BOS; ours has one."""
    name, ours, theirs = backends
    asked = [request(text) for text in TEXTS]
    expected = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    found = ours.loglikelihood_rolling(asked)
    if name != "adds bos":
        assert found == pytest.approx(expected, abs=TOLERANCE)
        return
    bos = ours.prefix_token_id
    for text, own, other in zip(TEXTS[:2], found, expected, strict=False):
        ids = ours.tok_encode(text, add_special_tokens=False)
        once, _, _ = oracle_score(ours.loaded.model, [bos], ids)
        twice, _, _ = oracle_score(ours.loaded.model, [bos], [bos, *ids])
        assert own == pytest.approx(once, abs=TOLERANCE)
        assert other == pytest.approx(twice, abs=TOLERANCE)


def test_greedy_texts_are_the_same(backends: Backends) -> None:
    _, ours, theirs = backends
    asked = [request(*one) for one in PROMPTS]
    expected = theirs.generate_until(
        [request(text, dict(kwargs)) for text, kwargs in PROMPTS], disable_tqdm=True
    )
    compared = 0
    for (text, kwargs), own, other in zip(PROMPTS, ours.generate_until(asked), expected, strict=True):
        limit = int(kwargs["max_gen_toks"])  # type: ignore[call-overload]
        ids = ours.tok_encode(text)[-(128 - limit) :]
        if oracle_generate(ours.loaded.model, ids, limit, [ours.eot_token_id])[1] > NEAR_TIE:
            assert own == other, text
            compared += 1
    assert compared >= 3
