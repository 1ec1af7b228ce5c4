#!/usr/bin/env python3
"""Train the embedded demo model and write its directory: a byte-level Llama of a million parameters.

    python scripts/train_demo.py            # writes mlx_eval/models/demo/, some 15 minutes on two cores
    python scripts/train_demo.py --steps 50 --out /tmp/demo

The text is that of demo_text.py, made up as it is needed and never repeated on purpose. The hidden
matrices are trained with Muon, the embedding and the norms with AdamW; both rates fall to zero linearly.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx_eval.models  # first: it brings the BLAS in before mlx

# isort: split
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from demo_text import Document, documents
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlx_eval.models.bytes import byte_tokenizer

OUT = Path(mlx_eval.models.__file__).parent / "demo"
SEED = 20
STEPS = 900
WARMUP_STEPS = 40
MUON_RATE = 0.01
ADAM_RATE = 3e-3
ANSWER_WEIGHT = 5.0
"""How much more a byte counts that can be worked out than one that is chance."""
SHORT, LONG = (12, 160), (4, 512)
"""Rows and length of a batch. Short ones are cheap; every fifth batch teaches the whole window."""
LONG_EVERY = 5

SPECIAL_IDS = {
    "<|bos|>": 256,
    "<|eos|>": 257,
    "<|pad|>": 258,
    "<|system|>": 259,
    "<|user|>": 260,
    "<|assistant|>": 261,
    "<|end|>": 262,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 480,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": SPECIAL_IDS["<|bos|>"],
    "eos_token_id": SPECIAL_IDS["<|eos|>"],
    "pad_token_id": SPECIAL_IDS["<|pad|>"],
    "dtype": "float16",
}
GENERATION_CONFIG = {
    "bos_token_id": SPECIAL_IDS["<|bos|>"],
    "eos_token_id": [SPECIAL_IDS["<|eos|>"], SPECIAL_IDS["<|end|>"]],
    "pad_token_id": SPECIAL_IDS["<|pad|>"],
}


class Batch(NamedTuple):
    """Token ids and how much each counts as a target, both [B, T]."""

    ids: mx.array
    weights: mx.array


class Loss(NamedTuple):
    """Means over a batch, in nats a byte."""

    weighted: mx.array
    text: mx.array
    facts: mx.array
    sums: mx.array


def encode(document: Document) -> tuple[list[int], list[float]]:
    """The ids of a document and the weight of each."""
    ids: list[int] = []
    weights: list[float] = []
    for piece in document:
        for part in re.split(r"(<\|[a-z]+\|>)", piece.text):
            new = [SPECIAL_IDS[part]] if part in SPECIAL_IDS else list(part.encode())
            ids += new
            weights += [ANSWER_WEIGHT if piece.is_answer else 1.0] * len(new)
    return ids, weights


def batches(seed: int) -> Iterator[Batch]:
    """Batches without end. Each row starts with a document and is cut where it is full."""
    streams = [documents(seed, 180), documents(seed + 1, 480)]
    step = 0
    while True:
        is_long = step % LONG_EVERY == LONG_EVERY - 1
        num_rows, length = LONG if is_long else SHORT
        ids = np.zeros((num_rows, length + 1), np.int32)
        weights = np.zeros((num_rows, length + 1), np.float32)
        for row in range(num_rows):
            row_ids: list[int] = []
            row_weights: list[float] = []
            while len(row_ids) <= length:
                new_ids, new_weights = encode(next(streams[is_long]))
                row_ids += new_ids
                row_weights += new_weights
            ids[row] = row_ids[: length + 1]
            weights[row] = row_weights[: length + 1]
        yield Batch(mx.array(ids), mx.array(weights))
        step += 1


def batch_loss(model: nn.Module, batch: Batch) -> Loss:
    """Cross entropy of each byte given those before it: weighted, and apart for text and kinds of answers."""
    logits = model(batch.ids[:, :-1])  # [B, T, V]
    nats = nn.losses.cross_entropy(logits, batch.ids[:, 1:])  # [B, T]
    weights = batch.weights[:, 1:]
    is_answer = weights > 1
    is_digit = (batch.ids[:, 1:] >= ord("0")) & (batch.ids[:, 1:] <= ord("9"))
    parts = (~is_answer, is_answer & ~is_digit, is_answer & is_digit)
    return Loss(
        (nats * weights).sum() / weights.sum(),
        *((nats * part).sum() / mx.maximum(part.sum(), 1) for part in parts),
    )


def make_optimizer(steps: int) -> optim.MultiOptimizer:
    """Muon for the matrices between the embedding and the head, AdamW for the rest."""

    def rate(top: float) -> Any:
        rise = optim.linear_schedule(0, top, WARMUP_STEPS)
        fall = optim.linear_schedule(top, top / 100, max(1, steps - WARMUP_STEPS))
        return optim.join_schedules([rise, fall], [WARMUP_STEPS])

    muon = optim.Muon(rate(MUON_RATE), weight_decay=0.0)
    adam = optim.AdamW(rate(ADAM_RATE), betas=[0.9, 0.98], weight_decay=0.0)
    return optim.MultiOptimizer([muon, adam], [lambda path, array: "proj" in path])


def train(steps: int, seed: int) -> nn.Module:
    """Train from scratch in float32 and print the loss as it falls."""
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(seed)
    model: nn.Module = Model(ModelArgs.from_dict(CONFIG))
    optimizer = make_optimizer(steps)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(ids: mx.array, weights: mx.array) -> Loss:
        loss, gradients = nn.value_and_grad(model, batch_loss)(model, Batch(ids, weights))
        optimizer.update(model, gradients)
        return Loss(*loss)

    started = time.perf_counter()
    recent: list[np.ndarray] = []
    for step, batch in zip(range(1, steps + 1), batches(seed), strict=False):
        loss = update(*batch)
        mx.eval(loss, state)
        recent.append(np.array([np.array(part) for part in loss]))
        if step % 50 == 0 or step == steps:
            weighted, text, facts, sums = np.mean(recent, axis=0)
            seconds = time.perf_counter() - started
            parts = f"loss {weighted:.4f}  text {text:.4f}  facts {facts:.4f}  sums {sums:.4f}"
            print(f"{step:5d}  {seconds:5.0f} s  {parts}", flush=True)
            recent.clear()
    return model


def save(model: nn.Module, out: Path) -> None:
    """Write the directory: configuration, float16 weights, tokenizer, chat template."""
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tree_map(lambda array: array.astype(mx.float16), model.parameters())))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "pt"})
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer = byte_tokenizer(
        bos_token_id=CONFIG["bos_token_id"],
        eos_token_id=CONFIG["eos_token_id"],
        pad_token_id=CONFIG["pad_token_id"],
        special_tokens=SPECIAL_IDS,
        vocab_size=CONFIG["vocab_size"],
        chat_template=CHAT_TEMPLATE,
        max_length=CONFIG["max_position_embeddings"],
    )
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded demo model.")
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write")
    options = parser.parse_args()
    save(train(options.steps, options.seed), options.out)


if __name__ == "__main__":
    main()
