"""Summaries: of results that lm-eval itself makes here, and of every odd shape written by hand."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_eval.errors import InputError
from mlx_eval.results.summary import Summary, SummaryRow, summarize

# Rows and answers: `right` of `total` questions are answered well, so that acc is right/total.
DATA = """
import datasets

def load(total=4, right=1, **kwargs):
    rows = [{"q": f"q{i}", "choices": ["yes", "no"], "label": int(i >= right)} for i in range(total)]
    return {"test": datasets.Dataset.from_list(rows)}
"""
CHOICE = """
task: {name}
custom_dataset: !function data.load
dataset_kwargs: {{total: {total}, right: {right}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: choices
doc_to_target: label
num_fewshot: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.5}}
"""
GENERATE = """
task: zoo_write
custom_dataset: !function data.load
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "yes"
generation_kwargs: {until: ["x"]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - {name: as-is, filter: [{function: take_first}]}
  - {name: last-word, filter: [{function: regex, regex_pattern: "(no)"}, {function: take_first}]}
"""
ROLL = """
task: zoo_page
custom_dataset: !function data.load
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
GROUPS = {
    "farm": "group: farm\ntask: [zoo_small, zoo_big]\naggregate_metric_list: [{metric: acc}]\n"
    "metadata: {version: 2}\n",
    "zoo": "group: zoo\ngroup_alias: The Zoo\ntask: [farm, zoo_own]\n"
    "aggregate_metric_list: [{metric: acc}]\n",
    "bare": "group: bare\ntask: [zoo_write, zoo_page]\n",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What simple_evaluate gives for groups in groups, a group without scores, filters and perplexity."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    class AlwaysYes(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(-1.0, True) if "yes" in request.args[1] else (-2.0, False) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [-2.0 * len(request.args[0]) * math.log(2) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            return ["yes" for _ in requests]

    folder = tmp_path_factory.mktemp("zoo")
    (folder / "data.py").write_text(DATA)
    for name, total, right in (("zoo_small", 4, 1), ("zoo_big", 12, 9), ("zoo_own", 4, 4)):
        (folder / f"{name}.yaml").write_text(CHOICE.format(name=name, total=total, right=right))
    (folder / "write.yaml").write_text(GENERATE)
    (folder / "page.yaml").write_text(ROLL)
    for name, text in GROUPS.items():
        (folder / f"{name}.yaml").write_text(text)
    found: Mapping[str, Any] = simple_evaluate(
        model=AlwaysYes(),
        tasks=["zoo", "bare"],
        bootstrap_iters=10,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    return found


def _rows(summary: Summary) -> dict[str, SummaryRow]:
    return {row.key: row for row in summary.rows}


def test_every_score_of_a_real_result_is_there_once(results: Mapping[str, Any]) -> None:
    expected = {
        f"{task}/{key}": value
        for task, metrics in results["results"].items()
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key
    }
    summary = summarize(results)
    assert summary.flat() == expected
    assert len(summary.rows) == len(expected)


def test_rows_of_a_real_result(results: Mapping[str, Any]) -> None:
    rows = _rows(summarize(results))
    small = rows["zoo_small/acc,none"]
    # sample standard error of 1 right in 4: sqrt(0.25 / 4)
    assert small == SummaryRow(
        task="zoo_small",
        alias="zoo_small",
        version="1.5",
        shots=0,
        filter="none",
        metric="acc",
        value=0.25,
        stderr=0.25,
        higher_is_better=True,
        n=4,
        is_group=False,
        depth=2,
    )
    farm = rows["farm/acc,none"]
    assert (farm.value, farm.n, farm.version, farm.is_group, farm.depth) == (10 / 16, 16, "2", True, 1)
    zoo = rows["zoo/acc,none"]
    assert (zoo.value, zoo.n, zoo.version, zoo.alias, zoo.depth) == (14 / 20, 20, None, "The Zoo", 0)
    assert (zoo.shots, zoo.higher_is_better) == (0, True)
    assert rows["zoo_own/acc,none"].depth == 1
    # the group `bare` has no scores: no row, and no indentation below it
    assert rows["zoo_write/exact_match,as-is"].depth == 0
    assert rows["zoo_write/exact_match,as-is"].value == 1.0
    assert rows["zoo_write/exact_match,last-word"].value == 0.0
    page = rows["zoo_page/bits_per_byte,none"]
    assert (page.higher_is_better, page.n) == (False, 4)
    assert page.value == pytest.approx(2.0)


def test_order_and_indentation_of_a_real_result(results: Mapping[str, Any]) -> None:
    lines = summarize(results).markdown().splitlines()
    names = [line.split("|")[1].rstrip() for line in lines[2:]]
    assert [name for name in names if name.strip()] == [
        " The Zoo",
        "  - farm",
        "   - zoo_small",
        "   - zoo_big",
        "  - zoo_own",
        " zoo_write",
        " zoo_page",
    ]
    assert len({len(line) for line in lines}) == 1, "columns line up"


def test_agrees_with_lm_evals_own_table(results: Mapping[str, Any]) -> None:
    from lm_eval.utils import make_table

    def cells(table: str) -> set[tuple[str, str, str]]:
        """(filter, metric, value) of each line of a Markdown table."""
        lines = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
        places = [lines[0].index(name) for name in ("Filter", "Metric", "Value")]
        found = [[line[place] for place in places] for line in lines[2:]]
        return {(line[0], line[1], f"{float(line[2]):.4f}") for line in found}

    assert cells(summarize(results).markdown()) == cells(make_table(results))


def test_a_file_gives_the_rows_of_the_dictionary(results: Mapping[str, Any], tmp_path: Path) -> None:
    from lm_eval.utils import handle_non_serializable

    path = tmp_path / "results_2025-01-01T00-00-00.json"
    kept = {key: value for key, value in results.items() if key != "samples"}
    path.write_text(json.dumps(kept, default=handle_non_serializable), encoding="utf-8")
    assert summarize(path) == summarize(str(tmp_path)) == summarize(results)


def test_output_formats_hold_the_same_rows(results: Mapping[str, Any]) -> None:
    summary = summarize(results)
    records = json.loads(summary.json())
    lines = list(csv.DictReader(io.StringIO(summary.csv())))
    assert len(records) == len(lines) == len(summary.rows)
    for row, record, line in zip(summary.rows, records, lines, strict=True):
        assert record["task"] == line["task"] == row.task
        assert record["value"] == float(line["value"]) == row.value
        assert "run" not in record
        assert "run" not in line
        assert line["stderr"] == ("" if row.stderr is None else repr(row.stderr))


def _one(**metrics: Any) -> dict[str, Any]:
    return {"results": {"t": metrics}}


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_is_strict(value: float) -> None:
    summary = summarize(_one(**{"acc,none": value, "acc_stderr,none": math.nan}))
    (record,) = json.loads(summary.json(), parse_constant=_refuse)
    assert record["value"] is None
    assert record["stderr"] is None
    assert summary.rows[0].value == pytest.approx(value, nan_ok=True)
    assert str(value) in summary.markdown()
    assert str(value) in summary.csv()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        ("0.5", 0.5),
        ("N/A", None),
        (None, None),
        ([1, 2], None),
        ({"a": 1}, None),
        (0.0, 0.0),
    ],
)
def test_values_of_any_kind(value: object, number: float | None) -> None:
    summary = summarize(_one(**{"m,f": value}))
    assert summary.flat() == {"t/m,f": number}
    json.loads(summary.json(), parse_constant=_refuse)
    assert "| m " in summary.markdown()


def test_numpy_values() -> None:
    import numpy as np

    summary = summarize(_one(**{"m,f": np.float32(0.5), "m_stderr,f": np.float64(0.25)}))
    assert summary.rows[0].value == 0.5
    assert summary.rows[0].stderr == 0.25
    assert '"value": 0.5' in summary.json()


@pytest.mark.parametrize("stderr", ["N/A", None, math.nan, [], "   N/A"])
def test_a_standard_error_that_was_not_computed(stderr: object) -> None:
    (row,) = summarize(_one(**{"m,f": 0.5, "m_stderr,f": stderr})).rows
    assert row.stderr is None


def test_a_metric_may_end_like_a_standard_error() -> None:
    rows = _rows(summarize(_one(**{"gap_stderr,f": 0.5, "m,f": 1.0, "m_stderr,g": 0.25})))
    assert {key: row.value for key, row in rows.items()} == {
        "t/gap_stderr,f": 0.5,
        "t/m,f": 1.0,
        "t/m_stderr,g": 0.25,
    }
    assert rows["t/m,f"].stderr is None


def test_a_bare_result() -> None:
    (row,) = summarize({"results": {"t": {"acc,none": 0.5}}}).rows
    assert row == SummaryRow("t", "t", None, None, "none", "acc", 0.5, None, None, None, False, 0)


OTHER_PARTS = (
    *("groups", "group_subtasks", "configs", "versions"),
    *("n-shot", "higher_is_better", "n-samples", "samples"),
)


@pytest.mark.parametrize("rest", [None, [], "x", 3, {"t": None}, {"t": "odd"}, {"t": []}])
def test_odd_parts_never_crash(rest: object) -> None:
    for key in OTHER_PARTS:
        summary = summarize({"results": {"t": {"acc,none": 0.5}}, key: rest})
        assert summary.flat() == {"t/acc,none": 0.5}
        assert summary.markdown()
        json.loads(summary.json())
    entry: object
    for entry in (None, [], "x", 3):
        assert summarize({"results": {"t": entry, "u": {"acc,none": 1}}}).flat() == {"u/acc,none": 1.0}


def test_no_scores() -> None:
    results: dict[str, Any]
    for results in ({"results": {}}, {"results": {"t": {"alias": "t", "sample_len": 3, " ": " "}}}):
        summary = summarize(results)
        assert summary.rows == ()
        assert summary.flat() == {}
        assert json.loads(summary.json()) == []
        assert summary.csv().count("\n") == 1
        assert summary.markdown() == "No scores."


def test_earlier_versions() -> None:
    """Groups as blanks and as `groups` alone, indented aliases, no n-samples, tasks as empty groups."""
    summary = summarize(
        {
            "results": {
                "g": {" ": " ", "alias": "g"},
                "a": {"acc,none": 0.5, "alias": " - a"},
                "b": {"acc": 1.0, "acc_stderr": 0.1},
            },
            "groups": {"g": {"acc,none": 0.75, "alias": "g"}},
            "group_subtasks": {"g": ["b", "a"], "a": [], "b": []},
            "versions": {"a": 0, "b": "Yaml", "g": "N/A"},
            "n-shot": {"a": 5, "b": 5},
            "configs": {
                "a": {"metric_list": [{"metric": "acc", "higher_is_better": True}]},
                "b": {"metric_list": [{"metric": "acc", "higher_is_better": True}]},
            },
            "n-samples": {"a": {"original": 30, "effective": 10}, "b": 7},
        }
    )
    group, b, a = summary.rows
    assert (group.task, group.n, group.shots) == ("g", 17, 5)
    assert (group.higher_is_better, group.is_group) == (True, True)
    assert (a.alias, a.version, a.n, a.depth) == ("a", "0", 10, 1)
    assert (b.filter, b.value, b.stderr, b.version) == ("none", 1.0, 0.1, "Yaml")


def test_groups_of_tasks_that_differ() -> None:
    summary = summarize(
        {
            "results": {"g": {"m,f": 1}, "a": {"m,f": 1}, "b": {"m,f": 1}},
            "group_subtasks": {"g": ["a", "b"]},
            "n-shot": {"a": 0, "b": 3},
            "higher_is_better": {"a": {"m": True}, "b": {"m": False}, "g": {"m": None}},
            "n-samples": {"a": {"effective": 4}},
        }
    )
    group = summary.rows[0]
    assert (group.shots, group.higher_is_better, group.n) == (None, None, None)


def test_groups_that_hold_each_other_or_share_a_task() -> None:
    entry = {"m,f": 1.0}
    circle = {"results": {"a": entry, "b": entry}, "group_subtasks": {"a": ["b"], "b": ["a"]}}
    assert sorted(row.task for row in summarize(circle).rows) == ["a", "b"]
    shared = {
        "results": {"g": entry, "h": entry, "t": entry},
        "group_subtasks": {"g": ["t"], "h": ["t", "missing"]},
    }
    assert [row.task for row in summarize(shared).rows] == ["g", "t", "h"]


def test_documents_counted_from_samples_that_were_logged() -> None:
    samples = [{"doc_id": 0, "filter": "a"}, {"doc_id": 1, "filter": "a"}, {"doc_id": 0, "filter": "b"}]
    (row,) = summarize({"results": {"t": {"m,a": 1}}, "samples": {"t": samples}}).rows
    assert row.n == 2


def test_names_do_not_break_the_table() -> None:
    table = summarize({"results": {"a|b\nc": {"m|n,f": 0.5}}}).markdown()
    assert len(table.splitlines()) == 3
    assert "a\\|b c" in table
    assert "m\\|n" in table


def test_several_results_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name, value in (("first", 0.25), ("second", 0.5)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "results_1.json"
        path.write_text(json.dumps({"results": {"t": {"m,f": value}}}))
        paths.append(path)
    summary = summarize([paths[0].parent, str(paths[1])])
    assert [row.run for row in summary.rows] == [str(paths[0].parent), str(paths[1])]
    assert list(summary.flat().values()) == [0.25, 0.5]
    assert summary.markdown().count("| Task") == 2
    assert f"**{paths[1]}**" in summary.markdown()
    lines = csv.DictReader(io.StringIO(summary.csv()))
    assert [line["run"] for line in lines] == [row.run for row in summary.rows]
    assert [row.run for row in summarize([{"results": {"t": {"m,f": 1}}}] * 2).rows] == ["1", "2"]


def test_the_newest_file_in_a_folder_or_below(tmp_path: Path) -> None:
    def write(name: str, value: int, time: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"results": {"t": {"m,f": value}}}))
        os.utime(path, (time, time))

    write("model/results_2025-02-01T00-00-00.json", 2, time=1)
    write("results_2025-01-01T00-00-00.json", 1, time=9)  # copied later: its name still says when it was made
    assert summarize(tmp_path).flat() == {"t/m,f": 2}
    write("other/results_2025-02-01T00-00-00.json", 3, time=5)
    assert summarize(tmp_path).flat() == {"t/m,f": 3}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{'a': 1}", "not JSON"),
        (b'{"doc_id": 1}\n{"doc_id": 2}\n', "not JSON"),
        (b"[1]", "holds no results"),
        (b"{}", "holds no results"),
        (b'{"results": []}', "holds no results"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_is_none_of_lm_evals(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "results_x.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said) as error:
        summarize(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_places_without_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        summarize(tmp_path / "missing")
    with pytest.raises(InputError, match=r"no results_\*\.json"):
        summarize(tmp_path)
    with pytest.raises(InputError, match="holds no results"):
        summarize({"acc": 1})
    with pytest.raises(InputError, match="result 2"):
        summarize([{"results": {}}, {"acc": 1}])
