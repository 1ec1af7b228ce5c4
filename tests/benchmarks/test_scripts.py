"""The scripts as they are called, on a tiny model and made-up requests. Nothing depends on how long they take."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.works import ROLLING, WORK
from tests.tiny import TOLERANCE, bpe_tokenizer, write_directory

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_REFERENCE = {name: value for name, value in os.environ.items() if name != "MLX_EVAL_REFERENCE"}


def script(name: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=WITHOUT_REFERENCE)
    assert finished.returncode == status, finished.stderr
    return finished


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    write_directory(directory, bpe_tokenizer())
    return directory


def test_without_the_reference_it_says_what_to_set() -> None:
    assert "MLX_EVAL_REFERENCE" in script("scoring.py", "--model", "nowhere", status=1).stderr


def test_unknown_names_are_refused() -> None:
    assert (
        "expected some of ours, mlx_lm, hf"
        in script("scoring.py", "--model", "x", "--backends", "vllm", status=2).stderr
    )


def test_planning_prints_its_figures() -> None:
    figures = json.loads(script("planning.py", "--questions", 50, "--tokens", 70, "--json").stdout)
    assert figures["requests"] == 200
    assert figures["unique tokens"] <= figures["planned tokens"] < figures["naive tokens"]


@pytest.mark.slow
def test_backends_are_compared_on_requests_from_a_file(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    backends = ["ours", "mlx_lm", "oracle"] + (["hf"] if importlib.util.find_spec("torch") else [])
    requests, figures, answers = tmp_path / "requests.json", tmp_path / "figures.json", tmp_path / "answers"
    requests.write_text(WORK.to_json())
    arguments = [
        *("--model", model, "--requests", requests, "--backends", ",".join(backends)),
        *("--peer_questions", 2, "--threads", 1, "--json", figures, "--answers", answers),
    ]
    finished = script("scoring.py", *arguments)
    assert "bare CPU s" in finished.stdout
    lines = json.loads(figures.read_text())
    assert [line["backend"] for line in lines] == backends
    ours, *peers = lines
    assert ours["questions"] == WORK.num_questions
    assert ours["plan"]["planned_tokens"] == ours["tokens"] >= ours["plan"]["unique_tokens"]
    for line in peers:
        assert (line["questions"], line["of_questions"]) == (2, WORK.num_questions)
        assert line["agreement"]["num_compared"] == 8
        assert line["agreement"]["num_beyond"] == 0
        assert line["tokens"] > ours["tokens"]
    by_name = {line["backend"]: line for line in lines}
    assert by_name["oracle"]["agreement"]["worst_nats"] <= TOLERANCE
    again = script("scoring.py", *arguments, "--reuse", "--no_bare")
    assert "mlx_lm (stored)" in again.stdout
    assert "ours (stored)" not in again.stdout


@pytest.mark.slow
def test_pages_in_windows_are_compared_with_hf_and_the_oracle(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    requests = tmp_path / "requests.json"
    requests.write_text(ROLLING.to_json())
    figures = tmp_path / "figures.json"
    arguments = ["--model", model, "--requests", requests, "--json", figures, "--threads", 1]
    script("scoring.py", *arguments, "--backends", "ours,mlx_lm,hf,oracle")
    agreements = {line["backend"]: line["agreement"] for line in json.loads(figures.read_text())}
    assert agreements["mlx_lm"] is None
    assert agreements["hf"]["num_beyond"] == agreements["oracle"]["num_beyond"] == 0
    assert agreements["oracle"]["worst_nats"] <= 2 * TOLERANCE  # some 150 tokens


@pytest.mark.slow
def test_the_parts_of_a_models_time_are_listed(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    requests = tmp_path / "requests.json"
    requests.write_text(WORK.to_json())
    command = [sys.executable, str(ROOT / "benchmarks" / "limits.py")]
    command += ["--model", str(model), "--requests", str(requests), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(
        finished.stdout
    )  # the status tells whether the times add up: not here, they are too short
    assert finished.returncode in {0, 1}
    assert 0 < found["share"] < 1
    assert found["lines"][-1][0] == "not explained"
