"""Preset files: what they give, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_eval.errors import InputError, InvalidOptionError, MlxEvalError, UnknownNameError
from mlx_eval.harness.preset_file import read_preset_file
from mlx_eval.harness.presets import EvalPreset

GOOD = """
[presets.short]
task = "arc_easy"

[presets.long]
name = "long"
task = ["mmlu_anatomy", "mmlu_astronomy"]
num_fewshot = 5
batch_size = "auto"
limit = 0.5
apply_chat_template = true
fewshot_as_multiturn = true
system_instruction = "Answer."
description = "two subjects"

[presets.long.gen_kwargs]
temperature = 0.7

[presets.long.extra]
bootstrap_iters = 0
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "presets.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key(tmp_path: Path) -> None:
    presets = read_preset_file(_write(tmp_path, GOOD))
    assert presets == {
        "short": EvalPreset("short", "arc_easy"),
        "long": EvalPreset(
            name="long",
            task=("mmlu_anatomy", "mmlu_astronomy"),
            num_fewshot=5,
            batch_size="auto",
            limit=0.5,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            system_instruction="Answer.",
            gen_kwargs={"temperature": 0.7},
            extra={"bootstrap_iters": 0},
            description="two subjects",
        ),
    }


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("", InputError, ["no presets"]),
        ("[presets]", InputError, ["no presets"]),
        ("presets = 3", InputError, ["no presets"]),
        ("[presets.p\n", InputError, ["TOML"]),
        ("[preset.p]\ntask = 'a'", UnknownNameError, ["presets"]),
        ("[presets]\np = 3", InvalidOptionError, ["'p'", "3"]),
        ("[presets.p]\nlimit = 3", InvalidOptionError, ["'p'", "task"]),
        (
            "[presets.p]\ntask = 'a'\nnum_fewshots = 3",
            UnknownNameError,
            ["'p'", "num_fewshots", "did you mean num_fewshot "],
        ),
        ("[presets.p]\ntask = 'a'\nbootstrap_iters = 3", UnknownNameError, ["'p'", "[presets.p.extra]"]),
        (
            "[presets.p]\ntask = 'a'\nnum_fewshot = 'five'",
            InvalidOptionError,
            ["'p'", "num_fewshot", "'five'"],
        ),
        ("[presets.p]\ntask = 3", InvalidOptionError, ["'p'", "task", "3"]),
        ("[presets.p]\ntask = 'a'\nlimit = 0", InvalidOptionError, ["'p'", "limit", "0"]),
        ("[presets.p]\ntask = 'a'\nname = 'q'", InvalidOptionError, ["'p'", "name"]),
        ("[presets.p]\ntask = 'a'\nextra.bootstrap = 0", UnknownNameError, ["'p'", "bootstrap_iters"]),
        (
            "[presets.p]\ntask = 'a'\nextra.confirm_run_unsafe_code = true",
            InvalidOptionError,
            ["--confirm_run"],
        ),
    ],
)
def test_a_bad_file_is_one_clear_line(
    tmp_path: Path, text: str, kind: type[MlxEvalError], said: list[str]
) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(kind) as error:
        read_preset_file(path)
    message = str(error.value)
    assert "\n" not in message
    assert all(part in message for part in [str(path), *said]), message


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.toml cannot be read"):
        read_preset_file(tmp_path / "missing.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_preset_file(tmp_path)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_preset_file(str(path))
