"""Tiny real models, their tokenizers, and the oracle: one request, one forward pass, float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_eval.models.bytes import byte_tokenizer
from mlx_eval.models.load import wrap_tokenizer
from mlx_eval.models.loaded import LoadedModel

TOLERANCE = 1e-4
"""Nats between the engine and the oracle, the bound for tiny models in float32."""
NEAR_TIE = 1e-4
"""Nats between the two most probable tokens below which either may count as the most probable."""

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}
CORPUS = (
    "The answer is 42. Answer: the quick brown fox jumps over the lazy dog.",
    "Question: what is the answer? Answer: the quick brown fox.",
    "Answer Answer Answer the quick the quick brown brown fox fox",
)
BOS, EOS, EOT = "<|bos|>", "<|eos|>", "<|eot|>"


@functools.cache
def bpe_tokenizer(adds_bos: bool = False, has_bos: bool = True, size: int = 330) -> Any:
    """A byte-level BPE trained on `CORPUS`: `Answer` and ` quick` are tokens, `é` and emojis are split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ([BOS] if has_bos else []) + [EOS, EOT]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    named = {"bos_token": BOS} if has_bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False, **named
    )


@functools.cache
def spm_tokenizer() -> Any:
    """A BPE in SentencePiece's style: `▁` for spaces, a space in front that decoding drops, bytes for the rest."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    reserved = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=reserved, show_progress=False)
    )
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    # anew, so that the bytes are ordinary tokens
    tokenizer = Tokenizer(models.BPE(trained.get_vocab(), merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(model_type: str = "llama", vocab_size: int = 330, seed: int = 0, **changes: Any) -> nn.Module:
    """A random mlx-lm model, seeded, with logits several nats apart."""
    from mlx_lm.utils import _get_classes

    config = {"model_type": model_type, **SHAPE, "vocab_size": vocab_size, **changes}
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    generator = np.random.default_rng(seed)

    def filled(path: str, array: Any) -> mx.array:
        noise = generator.standard_normal(array.shape)
        if array.ndim < 2:
            noise = 0.1 * noise + (0.0 if path.endswith("bias") else 1.0)
        elif "embed" not in path:
            noise = noise * 1.5 / np.sqrt(array.shape[-1])
        return mx.array(noise.astype(np.float32))

    model.update(tree_map_with_path(filled, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {
        "state_size": 4,
        "conv_kernel": 3,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "intermediate_size": 64,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 3,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, 10.0],
        "time_step_rank": 4,
        "max_position_embeddings": 64,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "num_key_value_heads": 1,
    },
}
"""Models whose state runs over every token, padding too."""


def loaded(
    model: nn.Module, tokenizer: Any, eos_token_id: Any = None, window: int = SHAPE["max_position_embeddings"]
) -> LoadedModel:
    """A `LoadedModel` of a model and a transformers tokenizer."""
    config = {"max_position_embeddings": window, "eos_token_id": eos_token_id}
    return LoadedModel(model, wrap_tokenizer(tokenizer, eos_token_id), config, "tiny")


def write_directory(path: Path, tokenizer: Any = None, **changes: Any) -> nn.Module:
    """Write a tiny llama as a Hugging Face directory; `changes` go into its config.json."""
    model = tiny_model()
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 330,
        **SHAPE,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tokenizer or bpe_tokenizer()).save_pretrained(str(path))
    return model


def request(*arguments: Any) -> Any:
    """What the backend reads of lm-eval's `Instance`."""
    return SimpleNamespace(args=arguments)


# ---------------------------------------------------------------- the oracle


def oracle_logits(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """Float64 logits [T, V] of one sequence on its own, over a fresh cache."""
    from mlx_lm.models.cache import make_prompt_cache

    logits = model(mx.array([list(ids)]), cache=make_prompt_cache(model))[0]
    return np.array(logits.astype(mx.float32)).astype(np.float64)


def oracle_logprobs(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """Float64 log-probabilities [T, V] of one sequence on its own."""
    logits = oracle_logits(model, ids)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def oracle_score(
    model: nn.Module, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool, float]:
    """Log-probability, is greedy, and the least distance of the two best tokens on the way."""
    logprobs = oracle_logprobs(model, [*context, *continuation][:-1])[len(context) - 1 :]
    best = np.sort(logprobs, axis=-1)
    total = float(sum(logprobs[place, token] for place, token in enumerate(continuation)))
    greedy = logprobs.argmax(axis=-1).tolist() == list(continuation)
    return total, greedy, float((best[:, -1] - best[:, -2]).min())


def assert_scores(
    model: nn.Module,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    answers: Sequence[tuple[float, bool]],
) -> None:
    """Each answer is the oracle's, is_greedy where it is no near-tie."""
    assert len(answers) == len(pairs)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, answers, strict=True):
        expected, greedy, margin = oracle_score(model, context, continuation)
        assert abs(logprob - expected) < TOLERANCE, (context, continuation)
        assert is_greedy == greedy or margin < NEAR_TIE, (context, continuation)


def oracle_generate(
    model: nn.Module, prompt: Sequence[int], count: int, eos: Sequence[int] = ()
) -> tuple[list[int], float]:
    """Greedy ids, a full forward pass each step, and the least distance of the two best tokens."""
    ids, margin = list(prompt), np.inf
    for _ in range(count):
        last = oracle_logits(model, ids)[-1]
        second, first = np.sort(last)[-2:]
        margin = min(margin, first - second)
        ids.append(int(last.argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :], float(margin)


# ---------------------------------------------------------------- a model that says what it is told

NUM_SCRIPTS = 16
SCRIPT_BOS, SCRIPT_EOS, SECOND_EOS, THINK, THINK_END, FIRST_SCRIPT = 256, 257, 258, 259, 260, 261
SCRIPT_VOCAB = FIRST_SCRIPT + NUM_SCRIPTS


def script_tokenizer() -> Any:
    """Bytes, and a special token for each script."""
    return byte_tokenizer(
        bos_token_id=SCRIPT_BOS,
        eos_token_id=SCRIPT_EOS,
        vocab_size=SCRIPT_VOCAB,
        special_tokens={
            "<|second_eos|>": SECOND_EOS,
            "<|think|>": THINK,
            "<|endthink|>": THINK_END,
            **{f"<|script{k}|>": FIRST_SCRIPT + k for k in range(NUM_SCRIPTS)},
        },
    )


class ScriptedModel(nn.Module):
    """After the token of script k it writes that script, then end-of-sequence tokens.

    It finds its place by looking back through the cache, as attention does, by the positions that it put there and
    through the mask that the cache makes: wrong caches give wrong texts. `spread` makes other tokens likely too, for
    sampling.
    """

    def __init__(self, *scripts: Sequence[int] | str, spread: float = 0.0) -> None:
        super().__init__()
        longest = max(len(_ids(script)) for script in scripts)
        table = np.full((NUM_SCRIPTS, longest + 1), SCRIPT_EOS, dtype=np.int32)
        for row, script in zip(table, scripts, strict=False):
            row[: len(_ids(script))] = _ids(script)
        self._table = mx.array(table)
        self._spread = spread
        self.calls: list[tuple[int, ...]] = []
        self.weight = mx.zeros((1,))

    @property
    def layers(self) -> list[Any]:
        return [self]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        from mlx_lm.models.base import create_attention_mask

        self.calls.append(tuple(inputs.shape))
        layer = None if cache is None else cache[0]
        steps = inputs.shape[1]
        begin = 0 if layer is None else layer.offset
        begin = begin[:, None] if isinstance(begin, mx.array) and begin.ndim else begin
        now = mx.broadcast_to(begin + mx.arange(steps), inputs.shape)  # [B, T]
        mask = create_attention_mask(inputs[..., None], layer, return_array=True)
        seen, places = (array.astype(mx.float32)[:, None, :, None] for array in (inputs, now))
        if layer is not None:
            seen, places = layer.update_and_fetch(seen, places)
        seen, places = (array[:, 0, :, 0].astype(mx.int32)[:, None] for array in (seen, places))  # [B, 1, L]
        is_mark = mx.logical_and(seen >= FIRST_SCRIPT, seen < SCRIPT_VOCAB)
        if mask is not None:
            is_mark = mx.logical_and(is_mark, mask[:, 0] if mask.ndim == 4 else mask)  # [B, T, L]
        marks = mx.broadcast_to(mx.where(is_mark, places, -1), (*inputs.shape, seen.shape[-1]))
        last = mx.max(marks, axis=-1)  # [B, T]
        found = mx.take_along_axis(
            mx.broadcast_to(seen, marks.shape), mx.argmax(marks, axis=-1)[..., None], -1
        )
        script = found[..., 0] - FIRST_SCRIPT
        step = mx.minimum(now - last, self._table.shape[1] - 1)
        chosen = self._table[mx.clip(script, 0, NUM_SCRIPTS - 1), step]  # [B, T]
        chosen = mx.where(last >= 0, chosen, SCRIPT_EOS)
        logits = (mx.arange(SCRIPT_VOCAB) == chosen[..., None]) * 20.0
        if self._spread:
            logits = mx.where(mx.arange(SCRIPT_VOCAB) < 128, logits * self._spread, -50.0)
        return logits + self.weight


def _ids(script: Sequence[int] | str) -> list[int]:
    return list(script.encode()) if isinstance(script, str) else list(script)
