"""How much memory does attention to a prefix that is stored once save? MMLU, 5-shot, one subject.

    MLX_EVAL_REFERENCE=DIR python benchmarks/prefix_memory.py --model ./model

The same questions are scored in three ways, each in a process of its own: the prefix is stored once and read in
place; stored once and copied to each row for a layer at a time; copied to each row for all layers. Prints the most
that MLX held at once above the weights, CPU seconds, and the largest difference of a score from the first way.
Batches may have the same rows in all three (`--batch_size`, `--batch_tokens`), which the planner would not allow
where memory is short.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.works import Recipe, Work, build_works, reference_folder

WAYS: Final = (
    "stored once, read in place",
    "stored once, copied for a layer at a time",
    "copied to each row",
)


def measure(work: Work, model: str, way: str, limits: tuple[int, int]) -> dict[str, Any]:
    """Score in this process."""
    from mlx_eval import load_model
    from mlx_eval.harness.encoding import Encoder, fit_request

    import mlx.core as mx  # isort: skip  # after mlx_eval, which loads the BLAS
    from mlx_eval import config
    from mlx_eval.engine.batches import Limits
    from mlx_eval.engine.plan import plan_scoring
    from mlx_eval.engine.score import Scorer
    from mlx_eval.engine.sharing import WAYS as ALL
    from mlx_eval.engine.sharing import Level, find_sharing
    from mlx_eval.models.head import RowHead

    loaded = load_model(model)
    encoder = Encoder(loaded.tokenizer)
    pairs = encoder.pairs([(context, continuation) for context, continuation in work.texts])
    requests = [
        fit_request(pair.context_ids, pair.continuation_ids, loaded.max_length).request for pair in pairs
    ]
    before = {
        WAYS[0]: None,
        WAYS[1]: next(one for one in ALL if one.splits_attention),
        WAYS[2]: next(one for one in reversed(ALL) if one.branches),
    }[way]
    head = RowHead(loaded.model, config.LOGITS_BYTES)
    sharing = find_sharing(loaded.model, head, after=before)
    assert sharing.way.level is not Level.ROWS, "the model does not share prefixes"
    scorer = Scorer(loaded.model, head, sharing)
    scores: dict[int, float] = {}
    plan = plan_scoring(requests, Limits(*limits), sharing.sharing, sharing.cache)
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    began = time.process_time()
    scorer.run(plan, requests, lambda index, score: scores.__setitem__(index, score.logprob))
    return {
        "way": way,
        "bytes": mx.get_peak_memory() - held,
        "seconds": time.process_time() - began,
        "rows": max(len(batch.rows) for batch in plan.batches),
        "prefix": max(batch.prefix_len for batch in plan.batches),
        "scores": [scores[index] for index in range(len(requests))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--subject", default="anatomy", help="(default: anatomy)")
    parser.add_argument("--questions", type=int, default=100, help="(default: 100)")
    parser.add_argument("--batch_size", type=int, default=32, help="rows (default: 32)")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="rows times length (default: 4096)")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        file, way = arguments.only
        work = Work.from_json(Path(file).read_text(encoding="utf-8"))
        print(json.dumps(measure(work, arguments.model, way, (arguments.batch_size, arguments.batch_tokens))))
        return
    recipe = Recipe(f"local_mmlu_{arguments.subject}", 5, None, None)
    work = build_works({arguments.subject: recipe}, reference_folder())[arguments.subject]
    options = [f"--{name}={getattr(arguments, name)}" for name in ("model", "batch_size", "batch_tokens")]
    line = [sys.executable, __file__, *options]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "work.json")
        file.write_text(work.first(arguments.questions).to_json(), encoding="utf-8")
        found = [json.loads(subprocess.check_output([*line, "--only", str(file), way])) for way in WAYS]
    first = found[0]
    print(
        f"MMLU {arguments.subject}, 5-shot, {arguments.questions} questions, {arguments.model}: "
        f"batches of up to {first['rows']} rows behind up to {first['prefix']} tokens\n"
    )
    print(
        "| prefix | MB above the weights | ratio | CPU s | largest difference, nats |\n|:--|--:|--:|--:|--:|"
    )
    for one in found:
        difference = max(abs(a - b) for a, b in zip(one["scores"], first["scores"], strict=True))
        print(
            f"| {one['way']} | {one['bytes'] / 1e6:,.0f} | {one['bytes'] / first['bytes']:.2f} | "
            f"{one['seconds']:.1f} | {difference:.1e} |"
        )


if __name__ == "__main__":
    main()
