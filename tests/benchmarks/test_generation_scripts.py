"""The scripts of generation as they are called, on a tiny model. Nothing depends on how long they take."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.benchmarks.generations import GENERATION
from tests.benchmarks.test_scripts import script
from tests.tiny import bpe_tokenizer, write_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    write_directory(directory, bpe_tokenizer())
    return directory


def test_without_the_reference_it_says_what_to_set() -> None:
    assert "MLX_EVAL_REFERENCE" in script("generation.py", "--model", "nowhere", status=1).stderr


def test_another_way_to_speculate_is_refused() -> None:
    assert "off, auto" in script("generation.py", "--model", "x", "--speculate", "often", status=2).stderr


@pytest.mark.slow
def test_backends_are_compared_on_prompts_from_a_file(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    peers = ["mlx_lm"] + (["hf"] if importlib.util.find_spec("torch") else [])
    requests, figures, answers = tmp_path / "requests.json", tmp_path / "figures.json", tmp_path / "answers"
    work = {**json.loads(GENERATION.to_json())}
    work["options"] = [
        {"until": ["zz"], **options} for options in work["options"]
    ]  # mlx_lm needs lists of stops
    work["options"][1]["until"] = ["fox"]
    requests.write_text(json.dumps(work))
    arguments = [
        *("--model", model, "--requests", requests, "--backends", ",".join(["ours", *peers])),
        *("--speculate", "off,2", "--threads", 1, "--json", figures, "--answers", answers),
    ]
    finished = script("generation.py", *arguments)
    assert "accepted" in finished.stdout
    lines = json.loads(figures.read_text())
    assert [line["backend"] for line in lines] == ["ours", "ours", *peers]
    ours, drafting, *others = lines
    assert (ours["differences"], drafting["differences"]) == (None, [])
    assert ours["counts"]["unique_tokens"] < ours["counts"]["prompt_tokens"]
    for line in others:
        assert line["same_prompts"]
        assert line["num_unexplained"] == 0
        assert line["counts"]["generated_tokens"] == ours["counts"]["generated_tokens"]
        assert line["counts"]["prefill_tokens"] >= line["counts"]["prompt_tokens"]
        assert line["counts"]["discarded_tokens"] >= 0
    again = script("generation.py", *arguments, "--reuse")
    assert "mlx_lm (stored)" in again.stdout
    assert "ours (stored)" not in again.stdout


@pytest.mark.slow
def test_decoding_alone_is_compared(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    without = [] if importlib.util.find_spec("torch") else ["--no_hf"]
    sizes = ["--rows", "1,3", "--prompt_tokens", 6, "--tokens", 5, "--repeat", 2, "--threads", 1]
    finished = script("decoding.py", "--model", model, *sizes, "--json", figures, *without)
    lines = json.loads(figures.read_text())
    assert [(line["rows"], line["tokens"]) for line in lines] == [(1, 4), (3, 12)]
    assert all(len(line["all_ours"]) == len(line["all_mlx_lm"]) == 2 for line in lines)
    assert "mlx_lm / ours" in finished.stdout


@pytest.mark.slow
def test_rows_behind_one_prompt_take_less_memory(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ["--rows", 32, "--shared_tokens", 40, "--own_tokens", 2, "--tokens", 3, "--threads", 1]
    script("generation_memory.py", "--model", model, *sizes, "--json", figures)
    document = json.loads(figures.read_text())
    shared, unshared = document["measured"]
    assert shared["prefill_tokens"] == 40 + 32 * 2
    assert unshared["prefill_tokens"] == 32 * 42
    assert shared["peak_rows"] == unshared["peak_rows"] == 32
    assert document["ratio"] == shared["bytes"] / unshared["bytes"]
