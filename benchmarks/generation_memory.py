"""How much memory do rows behind one prompt take, beside as many that share nothing?

    python benchmarks/generation_memory.py --model ./model

64 prompts of one length are continued by 32 tokens, all together: once with 900 tokens in common and 20 of their own,
once with another first token each, so that there is nothing to share. Each has a process of its own. Prints the most
that MLX held at once above the weights, CPU seconds of reading prompts and decoding, the prompts' tokens that were
computed and the most rows in a step. The status is 1 where the shared ones take more than half of the others' memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

MAY_TAKE: Final = 0.5
CASES: Final = ("shared", "unshared")


def prompts_of(ids: Any, case: str, arguments: argparse.Namespace) -> list[list[int]]:
    """The prompts of one case.

    Args:
        ids: what they are made of.
        case: of `CASES`.
        arguments: how many there are, and how long.
    """
    from mlx_eval.app.bench import random_prompts

    prompts = random_prompts(ids, arguments.rows, arguments.shared_tokens + arguments.own_tokens, seed=0)
    if case == "shared":
        own = prompts[:, : arguments.own_tokens].copy()  # no two begin alike
        prompts[:, : arguments.shared_tokens] = prompts[0, : arguments.shared_tokens]
        prompts[:, arguments.shared_tokens :] = own
    rows: list[list[int]] = prompts.tolist()
    return rows


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate in this process."""
    import numpy as np

    from mlx_eval.engine.counts import DecodeCounts
    from mlx_eval.engine.decode import Decoder
    from mlx_eval.models.load import load_model
    from mlx_eval.records import GenerationRequest

    import mlx.core as mx  # isort: skip  # after mlx_eval.models, which loads the BLAS

    loaded = load_model(arguments.model, dtype="float32")
    plain = sorted(set(loaded.tokenizer.get_vocab().values()) - set(loaded.tokenizer.all_special_ids))
    prompts = prompts_of(np.array(plain, np.int32), case, arguments)
    requests = [GenerationRequest(tuple(prompt), arguments.tokens) for prompt in prompts]
    decoder = Decoder(loaded.model)

    def run(asked: list[GenerationRequest]) -> None:
        decoder.counts = DecodeCounts()
        decoder.run(
            asked,
            batch_size=len(asked),
            decode=lambda ids: "",
            eos_token_ids=frozenset(),
            on_generation=lambda index, generation: None,
        )

    run([GenerationRequest(request.prompt_ids[:2], 2) for request in requests[:2]])  # tests the model
    mx.clear_cache()
    mx.reset_peak_memory()
    held, began = mx.get_active_memory(), time.process_time()
    run(requests)
    return {
        "case": case,
        "bytes": mx.get_peak_memory() - held,
        "seconds": time.process_time() - began,
        "prefill_tokens": decoder.counts.prefill_tokens,
        "peak_rows": decoder.counts.peak_rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a directory")
    add("--rows", type=int, default=64, help="(default: %(default)s)")
    add("--shared_tokens", type=int, default=900, help="that all prompts begin with (default: %(default)s)")
    add("--own_tokens", type=int, default=20, help="behind them (default: %(default)s)")
    add("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    add("--threads", type=int, default=2, help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--only", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments)))
        return
    names = ("model", "rows", "shared_tokens", "own_tokens", "tokens", "threads")
    line = [sys.executable, __file__, *(f"--{name}={getattr(arguments, name)}" for name in names)]
    threads = str(arguments.threads)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
    found = [json.loads(subprocess.check_output([*line, "--only", case], env=environment)) for case in CASES]
    shared, unshared = found
    ratio = shared["bytes"] / unshared["bytes"]
    print(
        f"{arguments.rows} rows, {arguments.shared_tokens} tokens that may be shared and {arguments.own_tokens} of "
        f"their own, {arguments.tokens} new, {arguments.model}\n"
    )
    print(
        "| prompts | MB above the weights | prompt tokens computed | most rows | CPU s |\n|:--|--:|--:|--:|--:|"
    )
    for one in found:
        print(
            f"| {one['case']} | {one['bytes'] / 1e6:,.0f} | {one['prefill_tokens']:,} | {one['peak_rows']} | "
            f"{one['seconds']:.1f} |"
        )
    print(f"\nshared / unshared: {ratio:.3f}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"measured": found, "ratio": ratio}, indent=1) + "\n", encoding="utf-8"
        )
    if ratio > MAY_TAKE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
