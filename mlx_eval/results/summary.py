"""lm-eval's results as flat rows, and those as a dictionary, Markdown, CSV or JSON.

Knows how scores are shown. What lm-eval's results look like shapes.py knows, where they are files.py.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from mlx_eval.results.files import check_results, read_results
from mlx_eval.results.shapes import EvalResults
from mlx_eval.results.tables import markdown_table

ARROWS: Final = {True: "↑", False: "↓", None: ""}


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One score: a metric of a task or group behind one filter."""

    task: str
    alias: str
    """The name that lm-eval's tables show."""
    version: str | None
    shots: int | None
    """Examples in the prompt; None where lm-eval does not say, or where a group's tasks differ."""
    filter: str
    """`none` where the answer was taken as it was."""
    metric: str
    value: float | None
    """None for a score that is not a number; NaN and infinities are kept."""
    stderr: float | None
    """None where it was not computed."""
    higher_is_better: bool | None
    n: int | None
    """Documents that were scored."""
    is_group: bool
    depth: int
    """How many of the groups above it have scores: 0 for the outermost."""
    run: str | None = None
    """Which result it comes from, when there were several."""

    @property
    def key(self) -> str:
        """`task/metric,filter`, behind the run and a slash when there were several."""
        key = f"{self.task}/{self.metric},{self.filter}"
        return key if self.run is None else f"{self.run}/{key}"


@dataclass(frozen=True, slots=True)
class Summary:
    """The scores of one or several evaluations, groups before what is in them."""

    rows: tuple[SummaryRow, ...]

    def flat(self) -> dict[str, float | None]:
        """`{"task/metric,filter": value}`, one entry a row."""
        return {row.key: row.value for row in self.rows}

    def markdown(self) -> str:
        """A Markdown table; of several runs one each, below its name."""
        runs = list(dict.fromkeys(row.run for row in self.rows))
        tables = []
        for run in runs:
            table = _markdown([row for row in self.rows if row.run == run])
            tables.append(table if run is None else f"**{run}**\n\n{table}")
        return "\n\n".join(tables) if tables else "No scores."

    def csv(self) -> str:
        """Comma-separated values with a header line; what is None stays empty."""
        columns = [name for name in _COLUMNS if name != "run" or self._has_runs]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([getattr(row, name) for name in columns] for row in self.rows)
        return text.getvalue()

    def json(self) -> str:
        """A JSON list of objects, one a row; NaN and infinities, which JSON lacks, become null."""
        rows = []
        for row in self.rows:
            record = {name: _finite(value) for name, value in asdict(row).items()}
            if row.run is None:
                del record["run"]
            rows.append(record)
        return json.dumps(rows, indent=2, ensure_ascii=False, allow_nan=False)

    @property
    def _has_runs(self) -> bool:
        return any(row.run is not None for row in self.rows)


_COLUMNS: Final = tuple(item.name for item in fields(SummaryRow))


def summarize(
    results: Mapping[str, Any] | str | Path | Sequence[Mapping[str, Any] | str | Path],
) -> Summary:
    """Flat rows of what lm-eval gives, whatever was run.

    Args:
        results: what `simple_evaluate` returns, a path to a `results_*.json` or to a folder with some
            (the newest counts), or a list of these, whose rows are then told apart by `run`.

    Raises:
        InputError: a file that is not there, empty, not JSON or no results of lm-eval.
    """
    if isinstance(results, str | Path):
        return Summary(tuple(_rows(read_results(results))))
    if isinstance(results, Mapping):
        return Summary(tuple(_rows(check_results(results, "the dictionary given"))))
    rows: list[SummaryRow] = []
    for place, one in enumerate(results, start=1):
        if isinstance(one, str | Path):
            rows.extend(_rows(read_results(one), run=str(one)))
        else:
            rows.extend(_rows(check_results(one, f"result {place}"), run=str(place)))
    return Summary(tuple(rows))


def _rows(results: Mapping[str, Any], run: str | None = None) -> Iterator[SummaryRow]:
    shaped = EvalResults(results)
    for name, depth in shaped.ordered():
        for score in shaped.scores(name):
            yield SummaryRow(
                task=name,
                alias=shaped.alias(name),
                version=shaped.version(name),
                shots=shaped.shots(name),
                filter=score.filter,
                metric=score.metric,
                value=score.value,
                stderr=score.stderr,
                higher_is_better=shaped.higher_is_better(name, score.metric),
                n=shaped.count(name, score),
                is_group=shaped.is_group(name),
                depth=depth,
                run=run,
            )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(rows: Sequence[SummaryRow]) -> str:
    headers = ["Task", "Version", "Filter", "Shots", "Metric", "", "Value", "Stderr", "n"]
    cells = []
    before = None
    for row in rows:
        name = f"{' ' * row.depth}- {row.alias}" if row.depth else row.alias
        first = row.task != before
        before = row.task
        cells.append(
            [
                name if first else "",
                (row.version or "") if first else "",
                row.filter,
                "" if row.shots is None else str(row.shots),
                row.metric,
                ARROWS[row.higher_is_better],
                "" if row.value is None else f"{row.value:.4f}",
                "" if row.stderr is None else f"± {row.stderr:.4f}",
                "" if row.n is None else str(row.n),
            ]
        )
    return markdown_table(headers, cells, align="lrlrllrrr")
