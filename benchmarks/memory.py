"""Does scoring need more memory when there are more questions? MMLU, 5-shot, over the eight subjects at hand.

    MLX_EVAL_REFERENCE=DIR python benchmarks/memory.py --tokenizer ./model

A small random Llama scores 100 questions and then, in a process of its own, 1,000, taken from the subjects in turn.
Prints the most that MLX held at once, the model with it, and how much the process grew while it scored: the latter
holds the requests' ids and what is planned too, which do grow. `--tokenizer` names a directory with a tokenizer that
transformers reads; no weights are needed. The status is 1 where MLX's peak grows by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.works import Recipe, Work, build_works, reference_folder

SUBJECTS: Final = (
    "anatomy",
    "astronomy",
    "college_physics",
    "computer_security",
    "high_school_european_history",
    "machine_learning",
    "moral_disputes",
    "world_religions",
)
MAY_GROW: Final = 1.10
SHAPE: Final = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def in_turn(works: Sequence[Work], num_questions: int) -> Work:
    """The first questions of several works, one of each in turn while it has any."""
    asked: list[list[tuple[tuple[str, ...], ...]]] = []
    for work in works:
        found: dict[int, list[tuple[str, ...]]] = {}
        for question, texts in zip(work.questions, work.texts, strict=True):
            found.setdefault(question, []).append(texts)
        asked.append([tuple(texts) for texts in found.values()])
    mixed = [texts for texts in chain.from_iterable(zip_longest(*asked)) if texts is not None]
    mixed = mixed[:num_questions]
    return Work(
        name=f"{len(mixed)} questions",
        kind="loglikelihood",
        texts=tuple(chain.from_iterable(mixed)),
        questions=tuple(chain.from_iterable([number] * len(texts) for number, texts in enumerate(mixed))),
    )


def measure(work: Work, tokenizer: str, batch_size: int | str) -> dict[str, Any]:
    """Score in this process; bytes."""
    from types import SimpleNamespace

    from mlx_eval.harness.lm import MLXEvalLM
    from mlx_eval.models.loaded import LoadedModel

    import mlx.core as mx  # isort: skip  # after mlx_eval.models, which loads the BLAS
    from mlx_lm.utils import _get_classes, load_tokenizer

    mx.random.seed(0)
    wrapped = load_tokenizer(Path(tokenizer))
    config = {**SHAPE, "vocab_size": len(wrapped.vocab)}
    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(config))
    mx.eval(model.parameters())
    lm: Any = MLXEvalLM(LoadedModel(model, wrapped, config, "random"), batch_size=batch_size)
    lm.loglikelihood([SimpleNamespace(args=("warm", " up")), SimpleNamespace(args=("warm", "er still"))])
    requests = [SimpleNamespace(args=texts) for texts in work.texts]
    mx.clear_cache()
    mx.reset_peak_memory()
    before = _peak_of_process()
    lm.loglikelihood(requests, disable_tqdm=True)
    return {
        "questions": work.num_questions,
        "requests": len(requests),
        "mlx_peak": mx.get_peak_memory(),
        "process_growth": _peak_of_process() - before,
    }


def _peak_of_process() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="a directory")
    parser.add_argument("--questions", type=int, nargs=2, default=(100, 1000), help="(default: 100 1000)")
    parser.add_argument("--batch_size", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batch_size = int(arguments.batch_size) if arguments.batch_size.isdecimal() else arguments.batch_size
    if arguments.only:
        work = Work.from_json(arguments.only.read_text(encoding="utf-8"))
        print(json.dumps(measure(work, arguments.tokenizer, batch_size)))
        return
    recipes = {subject: Recipe(f"local_mmlu_{subject}", 5, None, None) for subject in SUBJECTS}
    works = list(build_works(recipes, reference_folder()).values())
    found = []
    command = [sys.executable, __file__, f"--tokenizer={arguments.tokenizer}"]
    for count in arguments.questions:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "work.json")
            file.write_text(in_turn(works, count).to_json(), encoding="utf-8")
            only = [f"--batch_size={batch_size}", f"--only={file}"]
            found.append(json.loads(subprocess.check_output([*command, *only])))
    ratio = found[1]["mlx_peak"] / found[0]["mlx_peak"]
    if arguments.json:
        print(json.dumps({"measured": found, "ratio": ratio}))
    else:
        for one in found:
            print(
                f"{one['questions']:>6,} questions, {one['requests']:>6,} requests: MLX peak "
                f"{one['mlx_peak'] / 1e6:8.1f} MB, process grew by {one['process_growth'] / 1e6:8.1f} MB"
            )
        print(f"ratio of MLX's peaks: {ratio:.3f}")
    if ratio > MAY_GROW:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
