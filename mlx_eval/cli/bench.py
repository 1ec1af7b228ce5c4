"""`bench`: how fast a model is on this machine. Knows options and texts, not how anything is measured."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING, Any

from mlx_eval import config
from mlx_eval.cli.parser import (
    Subparsers,
    add_loading_arguments,
    add_model_argument,
    answer_length,
    loading_options,
    model_of,
    not_negative,
    positive,
    positives,
)
from mlx_eval.cli.run import say
from mlx_eval.errors import OutputError

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_eval.app.bench import Bench, Measurement

EXAMPLES = """\
examples:
  python -m mlx_eval bench demo --prompt_lengths 64,256
  python -m mlx_eval bench ./SmolLM2-135M-Instruct --batch_sizes 1,8 --prompt_lengths 256 --json speed.json
  python -m mlx_eval bench ./SmolLM2-135M-Instruct --quantize 4 --plot speed.png
"""
MIB = 2**20
GIB = 2**30
HEADERS = ("Stage", "Prompt", "Batch", "Tokens", "Tokens/s", "Wall s", "CPU s", "Peak MiB", "Above weights")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="how fast a model is on this machine",
        description="Measure how many tokens a second a model reads, generates and scores, and in what memory, with "
        "prompts of random tokens.",
        epilog=EXAMPLES,
    )
    add_model_argument(parser)
    add_loading_arguments(parser)
    group = parser.add_argument_group("what to measure")
    group.add_argument(
        "--batch_sizes",
        type=positives,
        default=config.BENCH_BATCH_SIZES,
        metavar="N,…",
        help=f"prompts at once (default: {_listed(config.BENCH_BATCH_SIZES)})",
    )
    group.add_argument(
        "--prompt_lengths",
        type=positives,
        default=config.BENCH_PROMPT_LENGTHS,
        metavar="N,…",
        help=f"tokens of a prompt (default: {_listed(config.BENCH_PROMPT_LENGTHS)})",
    )
    group.add_argument(
        "--gen_tokens",
        type=answer_length,
        default=config.BENCH_GEN_TOKENS,
        metavar="N",
        help=f"tokens of an answer, 2 or more (default: {config.BENCH_GEN_TOKENS})",
    )
    group.add_argument(
        "--repeat",
        type=positive,
        default=config.BENCH_REPEAT,
        metavar="N",
        help=f"timed runs, of which the median counts (default: {config.BENCH_REPEAT})",
    )
    group.add_argument(
        "--seed",
        type=not_negative,
        default=config.SEED,
        metavar="N",
        help=f"of the prompts (default: {config.SEED})",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write every figure there")
    output.add_argument(
        "--plot", metavar="FILE", help="draw speeds and memory as .png, .svg or .pdf; needs the extra report"
    )
    parser.set_defaults(func=run)


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the table."""
    source = model_of(arguments)
    assert source is not None
    from mlx_eval.app.bench import Bench, BenchJob, check_target

    json_file = None if arguments.json is None else check_target(arguments.json, "--json")
    plot_file = None if arguments.plot is None else check_target(arguments.plot, "--plot")
    if plot_file is not None:
        from mlx_eval.app.bench_plot import check_plot

        check_plot(plot_file)
    names = ("batch_sizes", "prompt_lengths", "gen_tokens", "repeat", "seed")
    options = {name: getattr(arguments, name) for name in names}
    bench = Bench(BenchJob(source, loading_options(arguments), **options), say)
    output = _Output(bench, ("python", "-m", "mlx_eval", *arguments.words), json_file, plot_file)
    arguments.interrupted = output.interrupted
    try:
        for measurement in bench.measurements():
            output.measured.append(measurement)
    finally:
        output.give()
    return 0


class _Output:
    """What was measured, on its way to the user: once, whichever way the command ends."""

    def __init__(
        self, bench: Bench, command: tuple[str, ...], json_file: Path | None, plot_file: Path | None
    ) -> None:
        self.measured: list[Measurement] = []
        self._bench = bench
        self._command = command
        self._json_file = json_file
        self._plot_file = plot_file
        self._giving = threading.Lock()
        self._is_given = False

    def give(self) -> None:
        """Print the table and write the files, unless that is done or there is nothing.

        Raises:
            OutputError: a file cannot be written; the table is printed by then.
        """
        with self._giving:  # whoever ends the program by force waits for it
            if self.measured and not self._is_given:
                self._is_given = True
                self._give()

    def _give(self) -> None:
        from mlx_eval.app.bench import report_of, write_report

        report = report_of(self._bench, self.measured, self._command)
        print("\n".join(_facts(report)), end="\n\n")
        print(_table(report), flush=True)
        if self._json_file is not None:
            write_report(report, self._json_file)
            print(f"wrote {self._json_file}", file=sys.stderr)
        if self._plot_file is not None:
            from mlx_eval.app.bench_plot import draw

            draw(report, self._plot_file)
            print(f"wrote {self._plot_file}", file=sys.stderr)

    def interrupted(self) -> str:
        """Give what there is; one line about it."""
        try:
            self.give()
        except (OutputError, OSError) as error:
            return f"interrupted; {error}"
        return f"interrupted; {len(self.measured)} of {self._bench.num_measurements} measurements were made"


def _facts(report: dict[str, Any]) -> list[str]:
    """What the figures depend on, a line each."""
    model, device, found = report["model"], report["device"], report["versions"]
    weights = (f"{model['bytes'] / MIB:,.1f} MiB", model["dtype"], model["quantization"] or "not quantised")
    facts = {
        "model": f"{model['source']} ({model['architecture']}, {model['parameters']:,} parameters)",
        "weights": ", ".join(weights),
        "fingerprint": model["fingerprint"],
        "device": f"{device['name']}, {device['memory_bytes'] / GIB:.1f} GiB, {device['os']}",
        "computed by": f"{device['kind']}, BLAS {device['blas']}, kernels {device['kernels']}",
        "versions": ", ".join(
            f"{name} {found[name]}" for name in ("python", "mlx", "mlx-lm", "mlx-eval") if name in found
        ),
        "runs": f"median of {report['options']['repeat']}, random prompts of seed {report['options']['seed']}, "
        f"answers of {report['options']['gen_tokens']} tokens",
    }
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def _table(report: dict[str, Any]) -> str:
    """A row for each measurement, stage by stage."""
    from mlx_eval.app.bench import STAGES
    from mlx_eval.results.tables import markdown_table

    rows = []
    for stage in STAGES:
        measured = [one for one in report["measurements"] if one["stage"] == stage]
        rows += [
            ("" if number else stage, f"{one['prompt_length']:,}", *_cells(one))
            for number, one in enumerate(measured)
        ]
    return markdown_table(HEADERS, rows, "lrrrrrrrr")


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    size = f"{one['batch_size']:,}"
    if "problem" in one:
        return (size, "", one["problem"], "", "", "", "")
    if one.get("rows_together", one["batch_size"]) < one["batch_size"]:
        size += f" ({one['rows_together']:,} together)"
    return (
        size,
        f"{one['tokens']:,}",
        f"{one['tokens_per_second']:,.1f}",
        f"{one['wall_seconds']:,.3f}",
        f"{one['cpu_seconds']:,.3f}",
        f"{one['peak_bytes'] / MIB:,.1f}",
        f"{one['above_weights_bytes'] / MIB:,.1f}",
    )
