"""Prints what a run would cost, for `run --dry_run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_eval.app.dry_run import Forecast

MIB = 2**20
HEADERS = ("Requests", "n", "Naive tokens", "Unique", "Planned", "Padding", "Forwards", "Peak KV")


def show(forecast: Forecast) -> None:
    """Print tables and lines."""
    from mlx_eval.results.tables import markdown_table

    if forecast.scoring:
        rows = [
            (
                one.kind + (" (windows)" if one.kind.endswith("rolling") else ""),
                f"{one.plan.num_requests:,}",
                f"{one.plan.naive_tokens:,}",
                f"{one.plan.unique_tokens:,}",
                f"{one.plan.planned_tokens:,}",
                f"{one.plan.padding / one.plan.planned_tokens:.1%}",
                f"{one.plan.num_forwards:,}",
                f"{one.plan.peak_kv_bytes / MIB:,.0f} MiB",
            )
            for one in forecast.scoring
        ]
        print(markdown_table(HEADERS, rows, "lrrrrrrr"))
    if forecast.generation is not None:
        work = forecast.generation
        print(
            f"generate_until: {work.num_requests:,} prompts, {work.prompt_tokens:,} tokens "
            f"({work.unique_tokens:,} unique); at most {work.max_tokens:,} tokens of answers"
        )
    print()
    for line in sharing_lines(forecast):
        print(line)
    print(_time(forecast))


def sharing_lines(forecast: Forecast) -> list[str]:
    """What the model may share, and what it may not and why."""
    from mlx_eval.engine.sharing import describe

    if not forecast.is_tested:
        return ["sharing: not tested; the plan hopes for " + describe(forecast.sharing.way)]
    lines = [f"sharing: {describe(forecast.sharing.way)}"]
    return lines + [f"  off: {finding}" for finding in forecast.sharing.findings]


def _time(forecast: Forecast) -> str:
    if not forecast.scoring:
        return "time: not estimated; it depends on where the answers end"
    if forecast.seconds is None:
        return "time: not measured without the weights"
    rest = "" if forecast.generation is None else ", the answers to be generated not counted"
    speed = f"{forecast.tokens_per_second:,.0f} planned tokens a second on a sample"
    return f"time: about {_duration(forecast.seconds)} for scoring ({speed}){rest}"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "a second"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
