"""What transformers continues prompts of one length with, most probable token by token. Knows no tokenizer.

python -m benchmarks.side_by_side.greedy_ids ASKED.json FOUND.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def greedy_ids(model: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Continue prompts together, in float32; no token ends one.

    Args:
        model: a directory.
        prompts: [B, P]
        num_tokens: of each answer.

    Returns:
        [B, num_tokens]
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # without dropout, as loaded
    loaded.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    found = loaded.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,  # nothing is padded
    )
    rows: list[list[int]] = found[:, ids.shape[1] :].tolist()
    return rows


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = greedy_ids(asked["model"], asked["prompts"], asked["tokens"])
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
