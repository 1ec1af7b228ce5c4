"""A picture of a bench's report. Knows the report's fields and matplotlib, which is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_eval.errors import InvalidOptionError, MissingDependencyError, OutputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: Final = {
    "prefill": "prefill, tokens/s",
    "decode": "decode, tokens/s",
    "scoring": "scoring, tokens/s",
    "memory": "peak memory above the weights, MiB",
}
"""Title of each panel."""
INCHES: Final = (10.0, 7.5)
DOTS_PER_INCH: Final = 150
MIB: Final = 2**20


def check_plot(target: Path) -> None:
    """See that a picture of that name can be drawn, before anything is computed.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidOptionError: the name's ending stands for no kind of picture.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "--plot", "report") from error
    if target.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise InvalidOptionError(
            f"--plot {target.name}: the ending says what kind of picture it is to be: give .png, .svg or .pdf"
        )


def draw(report: Mapping[str, Any], target: Path) -> None:
    """Draw speeds and memory over batch sizes, a line for each prompt length.

    Args:
        report: as `report_of` makes it.
        target: the file.

    Raises:
        OutputError: it cannot be written.
    """
    from matplotlib.figure import Figure

    measured = [one for one in report["measurements"] if "problem" not in one]
    figure = Figure(INCHES, layout="constrained")
    for (name, title), axes in zip(PANELS.items(), figure.subplots(2, 2).flat, strict=True):
        _draw_panel(axes, title, _memory(measured) if name == "memory" else _speeds(measured, name))
    figure.suptitle(_heading(report))
    try:
        figure.savefig(target, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


Lines = dict[int, dict[int, float]]
"""By prompt length, then by batch size."""


def _speeds(measured: Sequence[Mapping[str, Any]], stage: str) -> Lines:
    lines: Lines = {}
    for one in measured:
        if one["stage"] == stage:
            lines.setdefault(one["prompt_length"], {})[one["batch_size"]] = one["tokens_per_second"]
    return lines


def _memory(measured: Sequence[Mapping[str, Any]]) -> Lines:
    """The most that any of the stages took."""
    lines: Lines = {}
    for one in measured:
        line = lines.setdefault(one["prompt_length"], {})
        line[one["batch_size"]] = max(line.get(one["batch_size"], 0.0), one["above_weights_bytes"] / MIB)
    return lines


def _draw_panel(axes: Axes, title: str, lines: Lines) -> None:
    for length, line in lines.items():
        axes.plot(sorted(line), [line[size] for size in sorted(line)], marker="o", label=f"{length:,} tokens")
    sizes = sorted({size for line in lines.values() for size in line})
    axes.set_title(title)
    axes.set_xlabel("prompts at once")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(title="prompt")


def _heading(report: Mapping[str, Any]) -> str:
    model, device = report["model"], report["device"]
    precision = ", ".join(filter(None, (model["dtype"], model["quantization"])))
    return f"{model['source']} ({precision}) on {device['name']}, {device['kind']}"
