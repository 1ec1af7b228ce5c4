"""The sub-command `run` on the embedded model, and what it does with bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import mlx_eval.models
from mlx_eval.app import evaluate

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("own_tasks")

DEMO = Path(mlx_eval.models.__file__).parent / "demo"


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to load a model is a failure: the error was to be found before."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(evaluate, "load_model", load)


@pytest.fixture
def no_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to read tasks is a failure."""

    def prepare(*_: object, **__: object) -> None:
        raise AssertionError("the tasks were read")

    monkeypatch.setattr(evaluate, "prepare_tasks", prepare)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """(task, metric) -> cells of a printed table."""
    found: dict[tuple[str, str], list[str]] = {}
    task = ""
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        task = cells[0] or task
        found[task, cells[4]] = cells
    return found


def test_the_table_is_all_that_stdout_has(command: Any) -> None:
    status, out, err = command("run", "--preset", "demo", "--limit", "3")
    assert status == 0, err
    assert all(line.startswith("|") for line in out.splitlines())
    cells = rows(out)
    assert ("demo_choice", "acc") in cells
    assert ("demo_perplexity", "bits_per_byte") in cells
    assert ("demo_sums", "exact_match") in cells
    assert {row[-1] for row in cells.values()} == {"3"}


def test_files_of_a_run(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    words = ["run", "demo", "--tasks", "demo_sums", "--limit", "2", "--num-fewshot", "1", "--batch_size=3"]
    status, out, err = command(*words, "--output-path", folder, "--log-samples", "--max_length", "300")
    assert status == 0, err
    names = sorted(path.name for path in folder.iterdir())
    assert [name.split("_2")[0] for name in names] == ["results", "run.json", "samples_demo_sums"]
    record = json.loads((folder / "run.json").read_text())
    assert record["command"][:3] == ["python", "-m", "mlx_eval"]
    assert record["model"]["source"] == "demo"
    assert record["model"]["max_length"] == 300
    assert record["batch_size"] == 3
    assert record["requests"] == {"generate_until": 2}
    assert record["options"]["num_fewshot"] == 1
    assert {"index", "load", "generate", "total"} <= set(record["seconds"])
    assert record["tokens_per_second"]["generate"] > 0
    assert sorted(record["files"]) == [name for name in names if name != "run.json"]
    assert all(f"wrote {folder / name}" in err for name in names)
    samples = [json.loads(line) for line in (folder / names[2]).read_text().splitlines()]
    assert len(samples) == 2
    assert command("summarize", folder).out == out


def test_options_go_before_the_preset(command: Any, tmp_path: Path) -> None:
    presets = tmp_path / "own.toml"
    presets.write_text("[presets.mine]\ntask = 'demo_sums'\nnum_fewshot = 1\nlimit = 5\nbatch_size = 2\n")
    words = ["run", "demo", "--preset", "mine", "--preset_file", presets]
    status, out, err = command(*words, "--limit", "2", "--output_path", tmp_path / "run")
    assert status == 0, err
    cells = rows(out)["demo_sums", "exact_match"]
    assert (cells[3], cells[-1]) == ("1", "2")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["batch_size"] == 2


def test_a_low_memory_head_gives_the_same_table_and_is_recorded(command: Any, tmp_path: Path) -> None:
    words = ["run", "demo", "--tasks", "demo_choice", "--limit", "3"]
    status, out, err = command(*words, "--low-memory-head", "--output_path", tmp_path / "low")
    assert status == 0, err
    assert out == command(*words, "--output_path", tmp_path / "default").out
    options = [
        json.loads((tmp_path / name / "run.json").read_text())["options"] for name in ("low", "default")
    ]
    assert options[0]["low_memory_head"] is True
    assert "low_memory_head" not in options[1]


@pytest.mark.usefixtures("no_model", "no_tasks")
@pytest.mark.parametrize(
    ("words", "status", "part"),
    [
        (["demo"], 1, "give --tasks or --preset"),
        (["--tasks", "demo"], 1, "no model is given"),
        (["a", "--model", "b", "--tasks", "demo"], 1, "two models are given, b and a"),
        (["--preset", "demmo"], 1, "unknown preset 'demmo'; did you mean demo?"),
        (["demo", "--tasks", "demo", "--limit", "0"], 2, "--limit: 0 is neither"),
        (["demo", "--tasks", "demo", "--limit", "inf"], 2, "--limit: inf is neither"),
        (["demo", "--tasks", "demo", "--num_fewshot", "-1"], 2, "--num_fewshot: -1 is not"),
        (["demo", "--tasks", "demo", "--max_length", "1"], 2, "--max_length: 1 is not"),
        (["demo", "--tasks", "demo", "--batch_size", "0"], 2, "--batch_size: 0 is not"),
        (["demo", "--tasks", "demo", "--quantize", "7"], 2, "--quantize: 7 is none of"),
        (["demo", "--tasks", "demo", "--quantize", "4", "--dequantize"], 1, "contradict each other"),
        (["demo", "--tasks", "demo", "--gen_kwargs", "temperatur=1"], 1, "did you mean temperature"),
        (["no/such/model", "--tasks", "demo"], 1, "no/such/model does not exist; give a model directory"),
        (["./model.gguf", "--tasks", "demo"], 1, "./model.gguf does not exist"),
        (["demo", "--preset", "x", "--preset_file", "none.toml"], 1, "none.toml cannot be read"),
        (["demo", "--tasks", "demo", "--preset_file", "none.toml"], 1, "given without --preset"),
        (["demo", "--tasks", "demo", "--log_samples"], 1, "add --output_path DIR"),
        (["demo", "--tasks", "demo", "--chat_template_args", "a=1"], 1, "does nothing without --apply_chat"),
        (["demo", "--tasks", "demo", "--fewshot_as_multiturn"], 1, "does nothing without --apply_chat"),
        (["demo", "--tasks", "demo", "--model_args", "pretrained=x"], 2, "--model_args is lm-eval's"),
        (["demo", "--tasks", "demo", "--device", "mps"], 2, "--device is not needed"),
    ],
)
def test_wrong_options_are_found_first(
    command: Any, elsewhere: None, words: list[str], status: int, part: str
) -> None:
    finished = command("run", *words)
    assert (finished.status, finished.out, finished.err.count("\n")) == (status, "", 1), finished.err
    assert part in finished.err


@pytest.mark.usefixtures("no_model", "no_tasks")
@pytest.mark.parametrize("option", ["--output_path", "--use_cache"])
def test_a_place_that_cannot_be_written_is_found_before_the_run(
    command: Any, tmp_path: Path, option: str
) -> None:
    """A file in the way, since a test that runs as root may write anywhere else."""
    (tmp_path / "file").touch()
    finished = command("run", "demo", "--tasks", "demo", option, tmp_path / "file" / "run")
    assert (finished.status, finished.out, finished.err.count("\n")) == (1, "", 1)
    assert f"give another {option}" in finished.err


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("tasks", "part"),
    [
        ("demo_choise", "unknown task 'demo_choise'; did you mean demo_choice"),
        ("none.yaml", "no task file none.yaml"),
        ("demo,demo_sums", "'demo_sums' is named twice"),
    ],
)
def test_wrong_tasks_are_found_before_the_model_is_loaded(command: Any, tasks: str, part: str) -> None:
    finished = command("run", "demo", "--tasks", tasks)
    assert (finished.status, finished.out) == (1, "")
    assert finished.err.count("\n") == 1, finished.err
    assert part in finished.err


@pytest.mark.usefixtures("no_model")
def test_data_that_cannot_be_had(command: Any, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: owner/nothing-here\noutput_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: q\ndoc_to_target: 0\ndoc_to_choice: [a, b]\n"
    )
    finished = command("run", "demo", "--tasks", "far", "--include_path", tmp_path)
    assert (finished.status, finished.out) == (1, "")
    last = finished.err.splitlines()[-1]
    assert "the data of task far cannot be had" in last
    assert "point a task file at local data" in last


def test_more_shots_than_examples(command: Any) -> None:
    finished = command("run", "demo", "--tasks", "demo_sums", "--num_fewshot", "99", "--limit", "1")
    assert (finished.status, finished.out) == (1, "")
    assert "num_fewshot=99: a task has fewer examples" in finished.err.splitlines()[-1]


def copy_of_demo(folder: Path) -> Path:
    shutil.copytree(DEMO, folder)
    return folder


def damaged(folder: Path, name: str, content: bytes | None) -> Path:
    """The demo model with one file replaced, or cut in half where `content` is None."""
    path = copy_of_demo(folder) / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"no safetensors at all" * 10),
        ("model.safetensors", None),
        ("config.json", b""),
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no_such_architecture"}'),
        ("config.json", b"[]"),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b""),
    ],
)
def test_a_damaged_model_is_named_in_one_line(
    command: Any, tmp_path: Path, name: str, content: bytes | None
) -> None:
    folder = damaged(tmp_path / "model", name, content)
    finished = command("run", folder, "--tasks", "demo_sums", "--limit", "1")
    assert (finished.status, finished.out) == (1, ""), finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert str(folder) in finished.err


def test_what_is_no_model(command: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for name, part in [
        ("weights.bin", "neither a model directory nor a .gguf file"),
        ("empty", "holds no config.json"),
        ("broken.gguf", "broken.gguf"),
    ]:
        finished = command("run", tmp_path / name, "--tasks", "demo_sums")
        assert (finished.status, finished.out, finished.err.count("\n")) == (1, "", 1), finished.err
        assert part in finished.err
