"""`presets`: list the presets. Knows how to print them, not what is in them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_eval.harness.presets import EvalPreset

EXAMPLES = """examples:
  python -m mlx_eval presets
  python -m mlx_eval presets --preset_file my_presets.toml
  python -m mlx_eval run --model MODEL --preset gsm8k
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the sub-command to those of the command line."""
    parser = subparsers.add_parser(
        "presets",
        help="list the presets: tasks with the shots that published scores use",
        description="List the presets of the package, and those of a file of your own.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset_file", metavar="FILE", help="TOML file with presets of your own, as tables [presets.NAME]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print the presets; a preset of the file goes before one of the same name in the package."""
    import json

    from mlx_eval.harness.preset_file import read_preset_file
    from mlx_eval.harness.presets import PRESETS
    from mlx_eval.results.tables import markdown_table

    own = read_preset_file(args.preset_file) if args.preset_file else {}
    presets = list({**PRESETS, **own}.values())
    if args.json:
        print(json.dumps([_record(preset) for preset in presets], indent=2, ensure_ascii=False, default=str))
        return 0
    print(markdown_table(["Preset", "Tasks", "Shots", "Settings", "Description"], [_row(p) for p in presets]))
    print("\nShots: `task` leaves them to the task's own file.")
    return 0


def _record(preset: EvalPreset) -> dict[str, Any]:
    return {"name": preset.name, "description": preset.description, **preset.to_lm_eval_kwargs()}


def _row(preset: EvalPreset) -> list[str]:
    shots = "task" if preset.num_fewshot is None else str(preset.num_fewshot)
    settings = preset.to_lm_eval_kwargs()
    shown = [f"{name}={value}" for name, value in settings.items() if name not in {"tasks", "num_fewshot"}]
    return [preset.name, ", ".join(preset.tasks), shots, ", ".join(shown), preset.description]
