"""Two real GGUF files: SmolLM2 135M (Q4_1, byte-level BPE) and Gemma 3 270M (K-quants, SentencePiece).

No harness here: one text, one forward pass, its log-softmax in float64.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_eval.models.checkpoint import Checkpoint, build_model
from mlx_eval.models.gguf import read_gguf
from mlx_eval.models.gguf_file import GGUFFile, read_file

pytestmark = pytest.mark.slow

CACHE = Path(__file__).parents[2] / ".cache" / "real-model"
CONTINUATION_NATS = 1e-3
"""A few dozen tokens at about 1e-5 a token of float32 rounding, on both sides."""
ROWS = 6
"""Requests of each task that are scored here; test_golden.py scores them all through the backend."""


@pytest.fixture(scope="module")
def smollm2(real_model_path: Path) -> Checkpoint:
    return read_gguf(real_model_path, keep_quantized=False)


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Checkpoint) -> Any:
    return build_model(smollm2.config, smollm2.weights)


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    folder = Path(os.environ.get("MLX_EVAL_REAL_MODEL", CACHE / "x")).parent
    found = sorted({*folder.glob("gemma-3-270m*.gguf"), *CACHE.glob("gemma-3-270m*.gguf")})
    if not found:
        pytest.skip("no Gemma 3: run `python scripts/fetch_real_model.py --gemma`")
    return found[0]


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Checkpoint:
    return read_gguf(gemma_path, keep_quantized=False)


@pytest.fixture(scope="module")
def gemma_model(gemma: Checkpoint) -> Any:
    return build_model(gemma.config, gemma.weights)


def log_probabilities(model: Any, ids: list[int]) -> np.ndarray:
    """Log-probabilities of every token after each prefix, [len(ids), V], float64."""
    logits = np.array(model(mx.array([ids]))[0].astype(mx.float32)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def texts_of(golden: Any, task: str) -> list[str]:
    """Contexts joined with their continuations, and texts scored as a whole."""
    return [
        "".join(each for each in arguments if isinstance(each, str))
        for sample in golden(task)["samples"]
        for arguments in sample["arguments"]
    ]


def test_the_configuration_is_that_of_smollm2(smollm2: Checkpoint) -> None:
    config = smollm2.config
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct/blob/main/config.json
    wanted = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert smollm2.generation_config["eos_token_id"] == 2


def test_smollm2_ids_are_those_of_its_own_tokenizer(
    smollm2: Checkpoint, real_model_path: Path, golden: Any
) -> None:
    """Its tokenizer.json: digits one by one, then GPT-2's words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    file = read_file(real_model_path)
    tokens = file.array("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.array("tokenizer.ggml.merges")]
    own = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([tokens[i] for i in np.flatnonzero(file.array("tokenizer.ggml.token_type") == 3)])
    texts = [text for task in ("arc_easy_chat", "gsm8k_cot", "hellaswag") for text in texts_of(golden, task)]
    assert len(texts) > 100
    for text in [*texts, "naïve 12345 \u00a0 日本語 🙂\n\n\t"]:
        ids = smollm2.tokenizer(text)["input_ids"]
        assert ids == own.encode(text).ids
        assert smollm2.tokenizer.decode(ids) == text


@pytest.mark.parametrize("task", ["arc_easy", "arc_easy_chat", "blimp_adjunct_island", "boolq"])
def test_smollm2_scores_are_those_of_the_reference(
    smollm2: Checkpoint, smollm2_model: Any, golden: Any, task: str
) -> None:
    encode = smollm2.tokenizer.encode
    requests = [
        (arguments, answer)
        for sample in golden(task)["samples"]
        for arguments, (answer,) in zip(sample["arguments"], sample["resps"], strict=True)
        if arguments[0]
    ]
    for (context, continuation), (wanted, is_greedy) in requests[:ROWS]:
        stripped = context.rstrip()
        ids = encode(context + continuation)
        start = len(encode(stripped))
        assert ids[:start] == encode(stripped)
        rows = log_probabilities(smollm2_model, ids[:-1])[start - 1 :]
        assert np.isfinite(rows).all()
        score = rows[np.arange(len(rows)), ids[start:]].sum()
        assert abs(score - wanted) <= CONTINUATION_NATS
        assert bool((rows.argmax(axis=-1) == ids[start:]).all()) == is_greedy


def sentencepiece_of(file: GGUFFile) -> Any:
    """SentencePiece's own BPE over the file's pieces."""
    spm = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    model = ModelProto()
    pieces = zip(
        file.array("tokenizer.ggml.tokens"),
        file.array("tokenizer.ggml.scores"),
        file.array("tokenizer.ggml.token_type"),
        strict=True,
    )
    for piece, score, kind in pieces:
        # the converter writes user-defined pieces with plain spaces
        text = piece.replace(" ", "\u2581") if kind == 4 else piece
        model.pieces.add(piece=text, score=float(score), type=int(kind))
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 3, 2, 1, 0
    normalizer.name, normalizer.add_dummy_prefix = "identity", False
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    return spm.SentencePieceProcessor(model_proto=model.SerializeToString())


ENGLISH = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,   three, and a tab\t\tor two\n\n\nthree newlines",
    "def f(x):\n        return x ** 2  # 12345\n",
    "<h1>Überschrift</h1> naïve 日本語のテキスト 🏳️\u200d🌈 e\u0301",
    " leading and trailing ",
    "<0x41> \u2581 \u2581\u2581",
    " " * 70 + "\n" * 40,
)


def test_gemma_ids_are_those_of_sentencepiece(gemma: Checkpoint, gemma_path: Path) -> None:
    own = sentencepiece_of(read_file(gemma_path))
    for text in (*ENGLISH, Path(__file__).read_text(encoding="utf-8")):
        ids = gemma.tokenizer(text)["input_ids"]
        assert ids == [2, *own.encode(text)], text
        if "\u2581" not in text:  # which stands for a space
            assert gemma.tokenizer.decode(ids, skip_special_tokens=True) == text


def test_gemma_ids_of_real_rows_are_those_of_sentencepiece(
    gemma: Checkpoint, gemma_path: Path, golden: Any
) -> None:
    own = sentencepiece_of(read_file(gemma_path))
    for task in ("hellaswag", "gsm8k_cot", "mmlu_anatomy", "wikitext"):
        for text in texts_of(golden, task)[:100]:
            assert gemma.tokenizer(text, add_special_tokens=False)["input_ids"] == own.encode(text)


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("The quick brown fox jumps over the lazy", " dog"),
        ("The days of the week are Monday, Tuesday,", " Wednesday, Thursday, Friday"),
        ("Water is made of hydrogen and", " oxygen"),
    ],
)
def test_gemma_continues_in_english(
    prompt: str, continuation: str, gemma: Checkpoint, gemma_model: Any
) -> None:
    ids = gemma.tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(len(gemma.tokenizer(continuation, add_special_tokens=False)["input_ids"])):
        ids.append(int(mx.argmax(gemma_model(mx.array([ids]))[0, -1]).item()))
    assert gemma.tokenizer.decode(ids[start:]) == continuation


def test_gemma_logits_are_those_of_transformers(gemma: Checkpoint, gemma_model: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**gemma.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to_empty(device="cpu").eval()
    state = {name: torch.from_numpy(np.array(array)) for name, array in gemma.weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    # buffers are not in a state dict: the rotary tables are made anew, and the embedding's scale is
    # rounded as mlx-lm rounds it
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    scale = torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16).float()
    model.model.embed_tokens.embed_scale = scale
    # longer than the sliding window of 512
    ids = (gemma.tokenizer(" ".join(ENGLISH[:5]))["input_ids"] * 8)[:600]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, ::20].float().numpy()
    logits = np.array(gemma_model(mx.array([ids]))[0, ::20])
    # 18 layers of float32 rounding on logits of up to some 30
    np.testing.assert_allclose(logits, expected, atol=5e-3)
