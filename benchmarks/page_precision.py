"""Which float32 score of a long page is right? lm-eval's `hf` way and ours, beside a float64 run of the model.

    python -m mlx_eval convert model.gguf ./model
    python benchmarks/page_precision.py ./model page.txt

Scores one text in one window, from the prefix token on, four ways: ours; torch in float32 with the
float32 log_softmax that lm-eval's `hf` backend takes; torch in float32 with a float64 log_softmax; torch in float64.
Needs torch and transformers, and for a page of 5,000 tokens of a 135M model some 4 GB and several minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tabulate import tabulate

from mlx_eval.app.perplexity import read_text
from mlx_eval.harness.lm import MLXEvalLM
from mlx_eval.models.load import load_model

STEP = 1024
"""Tokens of one forward pass of torch's model, so that its logits stay small."""


def torch_scores(model: Any, ids: list[int], softmax_type: Any) -> float:
    """Sum of the log-probabilities of all ids but the first, each softmax in `softmax_type`."""
    import torch
    from transformers import DynamicCache

    inputs, targets = torch.tensor([ids[:-1]]), torch.tensor(ids[1:])
    cache, total = DynamicCache(), 0.0
    with torch.no_grad():
        for start in range(0, len(targets), STEP):
            piece = slice(start, start + STEP)
            logits = model(inputs[:, piece], past_key_values=cache, use_cache=True).logits[0]
            scores = torch.log_softmax(logits, dim=-1, dtype=softmax_type)
            total += scores.gather(1, targets[piece][:, None]).double().sum().item()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory that transformers reads")
    parser.add_argument("text", help="a text file")
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    text = read_text(arguments.text)
    lm = MLXEvalLM(load_model(arguments.model, dtype="float32"))
    ids = [lm.prefix_token_id, *lm.tok_encode(text)]
    assert len(ids) <= lm.max_length, "the text does not fit in one window"
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    ways: dict[str, Callable[[], float]] = {
        "mlx_eval, float32": lambda: lm.loglikelihood_rolling([SimpleNamespace(args=(text,))])[0],
        "torch, float32, softmax float32 (lm-eval hf)": lambda: torch_scores(model, ids, torch.float32),
        "torch, float32, softmax float64": lambda: torch_scores(model, ids, torch.float64),
        "torch, float64": lambda: torch_scores(model.double(), ids, torch.float64),
    }
    found = {name: score() for name, score in ways.items()}
    truth = found["torch, float64"]
    num_tokens = len(ids) - 1
    rows = [
        [name, f"{score:.4f}", f"{score - truth:+.4f}", f"{(score - truth) / num_tokens:+.1e}"]
        for name, score in found.items()
    ]
    print(f"{num_tokens} tokens, vocabulary {model.config.vocab_size:,}, torch {torch.__version__}")
    print(tabulate(rows, ["score", "nats", "from float64", "a token"], disable_numparse=True))


if __name__ == "__main__":
    main()
