"""Speeds of the embedded model: what is counted, what is refused, what happens without memory."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_eval import load_model
from mlx_eval.app.bench import (
    OUT_OF_MEMORY,
    STAGES,
    AnswerClock,
    Bench,
    BenchJob,
    Measurement,
    check_target,
    random_prompts,
    report_of,
    write_report,
)
from mlx_eval.app.bench_plot import check_plot, draw
from mlx_eval.engine.decode import Decoder
from mlx_eval.engine.score import Scorer
from mlx_eval.engine.together import ALONE
from mlx_eval.errors import (
    InvalidOptionError,
    MissingDependencyError,
    ModelError,
    OutOfMemoryError,
    OutputError,
)

SMALL: dict[str, Any] = {
    "model": "demo",
    "batch_sizes": (1, 3),
    "prompt_lengths": (5, 9),
    "gen_tokens": 4,
    "repeat": 2,
}
NO_MEMORY = "[malloc] Unable to allocate 123456 bytes."


def job(**changes: Any) -> BenchJob:
    return BenchJob(**{**SMALL, **changes})


def refuses(
    monkeypatch: pytest.MonkeyPatch, owner: type, is_refused: Callable[[int], bool], error: BaseException
) -> None:
    """Have `run` of the class fail where `is_refused` says so of the number of requests."""
    run = owner.run  # type: ignore[attr-defined]  # a Decoder or a Scorer

    def failing(self: Any, *args: Any, **options: Any) -> None:
        requests = next(one for one in args if isinstance(one, list))
        if is_refused(len(requests)):
            raise error
        run(self, *args, **options)

    monkeypatch.setattr(owner, "run", failing)


# ---------------------------------------------------------------- prompts


def test_no_two_prompts_begin_alike_and_all_ids_are_among_those_given() -> None:
    ids = np.array([3, 5, 7, 11, 13, 17], np.int32)
    prompts = random_prompts(ids, 6, 40, seed=0)
    assert prompts.shape == (6, 40)
    assert sorted(prompts[:, 0]) == ids.tolist()
    assert set(prompts.flat) == set(ids)


def test_the_seed_decides_the_prompts_whatever_else_is_measured() -> None:
    ids = np.arange(100, dtype=np.int32)
    one = random_prompts(ids, 4, 10, seed=1)
    random_prompts(ids, 2, 10, seed=1)
    assert np.array_equal(random_prompts(ids, 4, 10, seed=1), one)
    assert not np.array_equal(random_prompts(ids, 4, 10, seed=2), one)


# ---------------------------------------------------------------- what is counted


def test_every_stage_is_measured_at_every_place_and_counts_its_tokens() -> None:
    bench = Bench(job())
    found = list(bench.measurements())
    assert bench.num_measurements == len(found) == 12
    places = itertools.product((5, 9), (1, 3), STAGES)
    for one, (length, size, stage) in zip(found, places, strict=True):
        assert (one.stage, one.batch_size, one.prompt_length) == (stage, size, length)
        assert one.tokens == size * (3 if stage == "decode" else length)  # the first of four is not timed
        assert len(one.wall_seconds) == len(one.cpu_seconds) == 2
        assert all(seconds > 0 for seconds in one.wall_seconds)
        assert one.rows_together == (None if stage == "scoring" else size)
        assert one.problem is None


def test_each_measurement_is_warmed_up_once_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: Counter[type] = Counter()
    for owner in (Decoder, Scorer):

        def run(self: Any, *args: Any, run: Any = owner.run, **options: Any) -> None:
            runs[type(self)] += 1
            run(self, *args, **options)

        monkeypatch.setattr(owner, "run", run)
    list(Bench(job(batch_sizes=(2,), prompt_lengths=(5,), repeat=3)).measurements())
    assert runs == {Decoder: 8, Scorer: 4}  # prefill and decode, four each


def test_nothing_is_shared_and_no_row_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token ends a sequence of this model, if it is asked."""
    bench = Bench(job(batch_sizes=(8,), prompt_lengths=(20,), repeat=1))
    decoded: list[tuple[int, int, int]] = []
    planned: list[tuple[int, int]] = []
    run, score = bench._decoder.run, bench._scorer.run

    def watched(requests: Any, **options: Any) -> None:
        run(requests, **options)
        counts = bench._decoder.counts
        decoded.append((counts.unique_tokens, counts.prefill_tokens, counts.generated_tokens))

    def watched_score(plan: Any, *args: Any) -> None:
        score(plan, *args)
        planned.append((plan.naive_tokens, plan.planned_tokens))

    monkeypatch.setattr(bench._decoder, "run", watched)
    monkeypatch.setattr(bench._scorer, "run", watched_score)
    list(bench.measurements())
    assert decoded == [(160, 160, 8)] * 2 + [(160, 160, 32)] * 2
    assert planned == [(160, 160)] * 2


def test_memory_counts_the_weights_and_grows_with_the_batch() -> None:
    bench = Bench(job(batch_sizes=(1, 8), prompt_lengths=(60,), repeat=1))
    report = report_of(bench, list(bench.measurements()))
    above = {(one["stage"], one["batch_size"]): one["above_weights_bytes"] for one in report["measurements"]}
    assert bench.weight_bytes == report["model"]["bytes"] == load_model("demo").num_bytes
    for stage in STAGES:
        assert 0 < above[stage, 1] < above[stage, 8]
    for one in report["measurements"]:
        assert one["peak_bytes"] - bench.weight_bytes == one["above_weights_bytes"]


def test_the_clock_takes_the_last_first_token_for_the_border() -> None:
    clock = AnswerClock(2)
    for count in (8, 1, 1, 11):  # the first row is two tokens ahead when the second begins
        clock.count(count)
    for _ in range(5):
        clock.count(1)
    prefill, decode = clock.timings()
    assert (prefill.tokens, decode.tokens) == (7 + 10, 5)
    assert prefill.wall_seconds > 0
    assert decode.wall_seconds > 0


def test_prompts_that_are_continued_one_at_a_time_are_timed_by_the_last() -> None:
    bench = Bench(job(batch_sizes=(3,), prompt_lengths=(5,), repeat=1))
    bench._decoder.__dict__["decoding"] = ALONE  # a cached property
    prefill, decode, _ = bench.measurements()
    assert (prefill.tokens, decode.tokens) == (15, 3)
    assert (prefill.rows_together, decode.rows_together) == (1, 1)


def test_the_median_run_counts() -> None:
    one = Measurement("decode", 2, 5, tokens=30, wall_seconds=(9.0, 1.0, 2.0), cpu_seconds=(3.0, 4.0, 8.0))
    assert one.tokens_per_second == 15.0
    figures = one.as_dict(weight_bytes=0)
    assert (figures["wall_seconds"], figures["cpu_seconds"]) == (2.0, 4.0)
    assert figures["all_wall_seconds"] == [9.0, 1.0, 2.0]


def test_the_report_names_what_the_figures_depend_on() -> None:
    bench = Bench(job(loading={"dtype": "float32", "quantize": 4}, batch_sizes=(1,), prompt_lengths=(5,)))
    found = list(bench.measurements())
    report = json.loads(json.dumps(report_of(bench, found, ["bench"]), allow_nan=False))
    assert report["complete"]
    assert not report_of(bench, found[:2])["complete"]
    assert report["command"] == ["bench"]
    assert report["model"]["quantization"].startswith("4-bit")
    assert report["model"]["fingerprint"] == load_model("demo", dtype="float32", quantize=4).fingerprint()
    assert {"name", "kind", "memory_bytes", "blas", "kernels"} <= set(report["device"])
    assert {"python", "mlx", "mlx-lm"} <= set(report["versions"])
    assert report["options"] == {
        "dtype": "float32",
        "quantize": 4,
        "batch_sizes": [1],
        "prompt_lengths": [5],
        "gen_tokens": 4,
        "repeat": 2,
        "seed": 1234,
    }


# ---------------------------------------------------------------- what is refused


def test_what_does_not_fit_the_window_is_refused_before_anything_is_measured() -> None:
    window = load_model("demo").max_length
    fitting = {"prompt_lengths": (5, window - 4), "batch_sizes": (1,)}
    Bench(job(**fitting))
    with pytest.raises(
        InvalidOptionError, match=r"a prompt of 508 tokens and an answer of 5 .* window of 512"
    ):
        Bench(job(**fitting, gen_tokens=5))


def test_more_prompts_than_first_tokens_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="1,000 prompts cannot all begin with another"):
        Bench(job(batch_sizes=(1, 1000)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"model": "./no_such_folder"}, ModelError), ({"loading": {"dtype": "float64"}}, ValueError)],
)
def test_wrong_options_are_the_errors_of_a_run(changes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Bench(job(**changes))


# ---------------------------------------------------------------- memory runs out


@pytest.mark.parametrize(
    "error", [RuntimeError(NO_MEMORY), OutOfMemoryError("not one row"), MemoryError()], ids=repr
)
def test_a_measurement_without_memory_says_so_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refuses(monkeypatch, Decoder, lambda count: count == 2, error)
    bench = Bench(job(batch_sizes=(1, 2, 3), prompt_lengths=(5,), repeat=1))
    found = list(bench.measurements())
    problems = {(one.stage, one.batch_size): one.problem for one in found if one.problem}
    assert problems == {("prefill", 2): OUT_OF_MEMORY, ("decode", 2): OUT_OF_MEMORY}
    assert len(found) == bench.num_measurements == 9
    report = report_of(bench, found)
    assert report["complete"]
    assert [set(one) for one in report["measurements"] if "problem" in one] == [
        {"stage", "batch_size", "prompt_length", "problem"}
    ] * 2


def test_scoring_without_memory_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(monkeypatch, Scorer, lambda count: True, OutOfMemoryError("not one row"))
    found = list(Bench(job(batch_sizes=(1,), prompt_lengths=(5,), repeat=1)).measurements())
    assert [one.problem for one in found] == [None, None, OUT_OF_MEMORY]


def test_rows_that_were_begun_again_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder goes on with fewer rows when memory runs out: that is another batch size."""
    bench = Bench(job(batch_sizes=(3,), prompt_lengths=(5,), repeat=1))
    run = bench._decoder.run

    def short(requests: Any, **options: Any) -> None:
        run(requests, **options)
        bench._decoder.counts.restarted_rows = 1

    monkeypatch.setattr(bench._decoder, "run", short)
    assert [one.problem for one in bench.measurements()] == [OUT_OF_MEMORY, OUT_OF_MEMORY, None]


def test_other_errors_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses(monkeypatch, Decoder, lambda count: count == 3, RuntimeError("something else"))
    found: list[Measurement] = []
    with pytest.raises(RuntimeError, match="something else"):
        found.extend(Bench(job()).measurements())
    assert len(found) == 3


# ---------------------------------------------------------------- files


def report(*problems: str) -> dict[str, Any]:
    """A report without a model; the stages named have found no memory."""
    measured = [
        Measurement(stage, size, length, 10, (0.5,), (0.4,), 3 * 2**20)
        if stage not in problems
        else Measurement(stage, size, length, problem=OUT_OF_MEMORY)
        for length, size, stage in itertools.product((5, 9), (1, 8), STAGES)
    ]
    return {
        "model": {"source": "a_model_$x_1", "dtype": "float32", "quantization": "4-bit, groups of 64"},
        "device": {"name": "Chip", "kind": "cpu"},
        "measurements": [one.as_dict(2**20) for one in measured],
    }


def test_a_report_is_written_whole(tmp_path: Path) -> None:
    target = check_target(str(tmp_path / "new" / "speed.json"), "--json")
    write_report(report(), target)
    assert json.loads(target.read_text(encoding="utf-8")) == report()
    assert list(target.parent.iterdir()) == [target]


def test_a_report_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    target.mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        write_report(report(), target)
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_no_file_to_write_to(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"it is a folder; give --plot the name of a file"):
        check_target(str(tmp_path), "--plot")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"--plot needs matplotlib.*mlx-eval\[report\]"):
        check_plot(Path("speed.png"))


@pytest.mark.parametrize("problems", [(), ("decode",), STAGES], ids=["all", "without decode", "nothing"])
def test_a_plot_has_a_line_for_each_prompt_length(tmp_path: Path, problems: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "speed.svg"
    check_plot(target)
    draw(report(*problems), target)
    text = target.read_text(encoding="utf-8")
    for part in ("prefill, tokens/s", "peak memory", "a_model_$x_1", "4-bit", "Chip, cpu"):
        assert f"<!-- {part}" in text or part in text
    # a legend in each panel that has lines; memory has those of any stage
    num_panels = sum(stage not in problems for stage in STAGES) + (problems != STAGES)
    assert text.count("<!-- 9 tokens -->") == num_panels


def test_a_picture_of_unknown_kind_is_refused() -> None:
    pytest.importorskip("matplotlib")
    for name in ("speed", "speed.xyz"):
        with pytest.raises(InvalidOptionError, match=r"give .png, .svg or .pdf"):
            check_plot(Path(name))


def test_a_plot_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OutputError, match="cannot write"):
        draw(report(), tmp_path / "no_folder" / "speed.png")
