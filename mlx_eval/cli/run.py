"""`run`: evaluate a model on tasks or a preset."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_eval import config
from mlx_eval.cli.parser import (
    Subparsers,
    add_loading_arguments,
    add_model_argument,
    boolean,
    document_limit,
    key_values,
    loading_options,
    model_of,
    not_negative,
    print_error,
    rows,
    seeds,
    window,
)
from mlx_eval.config import DEMO_SOURCE
from mlx_eval.errors import InvalidOptionError

EXAMPLES = """\
examples:
  python -m mlx_eval run --preset demo
  python -m mlx_eval run ./SmolLM2-135M-Instruct --tasks arc_easy,hellaswag --limit 100
  python -m mlx_eval run mlx-community/Qwen3-0.6B-4bit --preset mmlu --output_path runs/qwen3
  python -m mlx_eval run model.gguf --tasks ifeval --apply_chat_template --log_samples --output_path runs/ifeval
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="evaluate a model on tasks or a preset",
        description="Evaluate a model on lm-eval's tasks. Options mean what they mean in lm-eval.",
        epilog=EXAMPLES,
    )
    add_model_argument(parser, required=False)
    add_loading_arguments(parser)
    tasks = parser.add_argument_group("what to evaluate")
    tasks.add_argument("--tasks", metavar="NAMES", help="tasks, groups, patterns or YAML files, with commas")
    tasks.add_argument(
        "--preset", metavar="NAME", help="tasks with the settings of published scores; see: presets"
    )
    tasks.add_argument("--preset_file", metavar="FILE", help="TOML file with presets of your own")
    tasks.add_argument("--include_path", action="append", metavar="DIR", help="folder of further task files")
    tasks.add_argument("--num_fewshot", type=not_negative, metavar="N", help="examples in the prompt")
    tasks.add_argument(
        "--limit",
        type=document_limit,
        metavar="N",
        help="documents a task, or a share of them between 0 and 1",
    )
    tasks.add_argument(
        "--seed", type=seeds, metavar="N", help="one seed, or four: python,numpy,torch,fewshot"
    )
    tasks.add_argument(
        "--confirm_run_unsafe_code",
        action="store_true",
        help="run the code that the model writes, where a task does",
    )
    _add_prompt_arguments(parser)
    engine = parser.add_argument_group("computing")
    engine.add_argument(
        "--batch_size",
        type=rows,
        metavar="N",
        help="the most rows computed together (default: auto, what fits)",
    )
    engine.add_argument("--max_length", type=window, metavar="N", help="context window in tokens")
    engine.add_argument(
        "--use_cache", metavar="PATH", help="lm-eval's database of answers, to be filled and used"
    )
    engine.add_argument(
        "--cache_requests",
        choices=("true", "refresh", "delete"),
        help="keep lm-eval's requests between runs: use, make anew, or delete them",
    )
    engine.add_argument(
        "--low_memory_head",
        action="store_true",
        help="score without a block of logits: saves its memory, not time, and is not there for all models",
    )
    engine.add_argument(
        "--speculate",
        metavar="off|auto|N",
        help="draft greedy answers from the text before them, N tokens "
        f"(1 to {config.LONGEST_DRAFT}) or as many as pay, and verify them: the same texts but for ties that "
        f"rounding decides (default: {config.SPECULATE})",
    )
    engine.add_argument(
        "--dry_run",
        action="store_true",
        help="plan only: print tokens, memory and about how long it would take",
    )
    engine.add_argument(
        "--no_weights", action="store_true", help="with --dry_run: do not load the model; no time is measured"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output_path", metavar="DIR", help="folder of this run: results, samples and run.json"
    )
    output.add_argument(
        "--log_samples", action="store_true", help="write every document with its answers too"
    )
    parser.set_defaults(func=run)


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("prompts and generation")
    prompt.add_argument(
        "--apply_chat_template",
        nargs="?",
        const=True,
        metavar="NAME",
        help="write prompts in the model's chat template, or in the one of that name",
    )
    prompt.add_argument(
        "--chat_template_args", type=key_values, metavar="K=V,…", help="arguments of the template"
    )
    prompt.add_argument(
        "--fewshot_as_multiturn",
        nargs="?",
        const=True,
        type=boolean,
        metavar="BOOL",
        help="examples as turns of the conversation (default with a chat template)",
    )
    prompt.add_argument("--system_instruction", metavar="TEXT", help="system message")
    prompt.add_argument(
        "--gen_kwargs", type=key_values, metavar="K=V,…", help="generation arguments of all tasks"
    )
    prompt.add_argument(
        "--think_end_token", metavar="TEXT", help="what ends a thinking section (default: the model's)"
    )
    prompt.add_argument("--add_bos_token", type=boolean, metavar="BOOL", help="start texts with a BOS token")


def run(arguments: argparse.Namespace) -> int:
    """Do it and print the table."""
    if arguments.log_samples and arguments.output_path is None:
        raise InvalidOptionError("--log_samples needs a folder to write to: add --output_path DIR")
    if arguments.no_weights and not arguments.dry_run:
        raise InvalidOptionError("--no_weights goes with --dry_run only")
    job = _job(arguments)
    if arguments.dry_run:
        from mlx_eval.app.dry_run import forecast
        from mlx_eval.cli.dry_run import show

        show(forecast(job, weights=not arguments.no_weights, on_stage=say))
        return 0
    from mlx_eval.app.evaluate import evaluate

    outcome = evaluate(job, say, began=arguments.began)
    print(outcome.summary.markdown())
    for path in outcome.files:
        print(f"wrote {path}", file=sys.stderr)
    if outcome.problem is not None:
        print_error(outcome.problem)
        return 1
    return 0


def say(text: str) -> None:
    """A line for somebody who waits at a terminal."""
    if sys.stderr.isatty():
        print(f"{text} …", file=sys.stderr)


def _job(arguments: argparse.Namespace) -> Any:
    """The job that the options describe; those given go before the preset's."""
    from mlx_eval.app.evaluate import Job

    evaluation = _preset_arguments(arguments)
    if arguments.tasks is not None:
        evaluation["tasks"] = [name for name in arguments.tasks.split(",") if name]
    tasks = evaluation.pop("tasks", None)
    if not tasks:
        raise InvalidOptionError("nothing to evaluate: give --tasks or --preset (python -m mlx_eval presets)")
    for name in ("num_fewshot", "limit", "apply_chat_template", "fewshot_as_multiturn", "system_instruction"):
        if getattr(arguments, name) is not None:
            evaluation[name] = getattr(arguments, name)
    for name in ("chat_template_args", "fewshot_as_multiturn"):
        if getattr(arguments, name) and not evaluation.get("apply_chat_template"):
            raise InvalidOptionError(f"--{name} does nothing without --apply_chat_template: add that")
    evaluation.update(_harness_arguments(arguments))
    batch_size = evaluation.pop("batch_size", None) if arguments.batch_size is None else arguments.batch_size
    backend = {
        "batch_size": batch_size,
        "max_length": arguments.max_length,
        "chat_template_args": arguments.chat_template_args,
        "think_end_token": arguments.think_end_token,
        "add_bos_token": arguments.add_bos_token,
        "seed": None if arguments.seed is None else arguments.seed[2],
        "low_memory_head": arguments.low_memory_head or None,
        "speculate": arguments.speculate,
    }
    model = model_of(arguments)
    if model is None and arguments.preset == DEMO_SOURCE:
        model = DEMO_SOURCE
    if model is None:
        raise InvalidOptionError("no model is given: name a directory, a .gguf file, a hub id or demo")
    return Job(
        model=model,
        tasks=tuple(tasks),
        loading=loading_options(arguments),
        backend={name: value for name, value in backend.items() if value is not None},
        evaluation=evaluation,
        include_path=tuple(arguments.include_path or ()),
        output_path=arguments.output_path,
        log_samples=arguments.log_samples,
        command=("python", "-m", "mlx_eval", *arguments.words),
    )


def _preset_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.preset is None:
        if arguments.preset_file is not None:
            raise InvalidOptionError("--preset_file is given without --preset: name the preset to run")
        return {}
    from mlx_eval.harness.preset_file import read_preset_file
    from mlx_eval.harness.presets import get_preset

    own = None if arguments.preset_file is None else read_preset_file(arguments.preset_file)
    return get_preset(arguments.preset, own).to_lm_eval_kwargs()


def _harness_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those of lm-eval's arguments that are spelled otherwise there."""
    found: dict[str, Any] = {}
    if arguments.gen_kwargs is not None:
        found["gen_kwargs"] = arguments.gen_kwargs
    if arguments.confirm_run_unsafe_code:
        found["confirm_run_unsafe_code"] = True
    if arguments.use_cache is not None:
        found["use_cache"] = arguments.use_cache
    if arguments.cache_requests is not None:
        found["cache_requests"] = arguments.cache_requests != "delete"
        found["rewrite_requests_cache"] = arguments.cache_requests == "refresh"
        found["delete_requests_cache"] = arguments.cache_requests == "delete"
    if arguments.seed is not None:
        names = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
        found.update(zip(names, arguments.seed, strict=True))
    return found
