"""The scripts that the macOS workflow runs, as far as they can be tried without a Mac."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_eval_kernels.launch import Dispatch, Source

from scripts import export_kernels, probe_metal, shader_validation
from tests.msl.build import PRELUDE, why_not
from tests.msl.emulate import EmulationError, Emulator

METAL = Path(export_kernels.__file__).parents[1] / "kernels" / "mlx_eval_kernels" / "metal"
STARTED = "2026-01-01 12:00:00.000 python[17:9] Metal GPU Validation Enabled"
OUR_REPORT = (
    'Invalid device load at offset 4096, executing kernel function: "custom_kernel_mlx_eval_logprob_float"'
)
MLX_REPORT = 'Invalid device store at offset 8, executing kernel function: "affine_qmm_t_splitk_float16_t"'
needs_emulation = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
without_metal = pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal here")


def saying(*lines: str, status: int = 0) -> list[str]:
    """A command that says so on stderr."""
    text = "".join(line + "\n" for line in lines)
    return [sys.executable, "-c", f"import sys; sys.stderr.write({text!r}); sys.exit({status})"]


def validated(command: list[str]) -> int:
    return shader_validation.main(["--", *command])


def test_a_silent_command_under_validation_passes() -> None:
    assert validated(saying(STARTED)) == 0


def test_a_report_of_our_kernel_fails_and_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    assert validated(saying(STARTED, OUR_REPORT, "buffer: <unnamed>, length:4096", OUR_REPORT)) == 1
    out, err = capfd.readouterr()
    assert "2 reports: custom_kernel_mlx_eval_logprob_float" in out
    assert err.splitlines().count(OUR_REPORT) == 2  # passed on


def test_a_report_behind_other_text_fails() -> None:
    assert validated(saying(STARTED, f"tests/kernels/test_logprob.py ..{OUR_REPORT}")) == 1


def test_a_report_without_a_name_fails() -> None:
    assert validated(saying(STARTED, "Invalid threadgroup store at offset 32768")) == 1


def test_a_report_of_somebody_elses_kernel_is_counted_only(capfd: pytest.CaptureFixture[str]) -> None:
    assert validated(saying(STARTED, MLX_REPORT)) == 0
    assert "1 reports: affine_qmm_t_splitk_float16_t" in capfd.readouterr().out


def test_without_the_validation_silence_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert validated(saying("warning: Invalid option")) == 1
    assert "did not start" in capfd.readouterr().out


def test_the_commands_own_failure_stays() -> None:
    assert validated(saying(STARTED, status=3)) == 3


def test_other_settings_of_metal_do_not_reach_the_command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTL_SHADER_VALIDATION_ENABLE_ERROR_REPORTING", "0")
    monkeypatch.setenv("MTL_SHADER_VALIDATION", "0")
    code = "import os; print(sorted(f'{n}={v}' for n, v in os.environ.items() if n.startswith('MTL_')))"
    validated([sys.executable, "-c", code])
    expected = ["MTL_SHADER_VALIDATION=1", "MTL_SHADER_VALIDATION_REPORT_TO_STDERR=1"]
    assert str(expected) in capfd.readouterr().out


@pytest.mark.parametrize(("capture", "status"), [("no", 1), ("fd", 0)])
def test_reports_within_tests_are_seen_where_pytest_captures_nothing(
    tmp_path: Path, capture: str, status: int
) -> None:
    """Why the workflow runs pytest with --capture=no."""
    suite = tmp_path / "test_suite.py"
    suite.write_text(f"import os\ndef test_kernel():\n    os.write(2, {(OUR_REPORT + chr(10)).encode()!r})\n")
    pytest_command = f"pytest.main(['-q', '-p', 'no:cacheprovider', '--capture={capture}', {str(suite)!r}])"
    start = f"os.write(2, {(STARTED + chr(10)).encode()!r})"
    command = [sys.executable, "-c", f"import os, sys, pytest; {start}; sys.exit({pytest_command})"]
    assert validated(command) == status


@pytest.mark.parametrize("arguments", [[], ["--canary", "--", "true"]])
def test_a_command_or_the_canary(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        shader_validation.main(arguments)


@pytest.mark.parametrize(("name", "status"), [("custom_kernel_canary_float", 0), ("other", 1)])
def test_the_canary_succeeds_where_its_own_read_is_reported(
    monkeypatch: pytest.MonkeyPatch, name: str, status: int
) -> None:
    report = f'Invalid device load at offset 9, executing kernel function: "{name}"'
    monkeypatch.setattr(
        shader_validation, "CANARY", f"import os; os.write(2, {(report + chr(10)).encode()!r})"
    )
    assert shader_validation.main(["--canary"]) == status


@without_metal
def test_without_metal_the_canary_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert shader_validation.main(["--canary"]) == 1
    assert "did not start" in capfd.readouterr().out


@needs_emulation
def test_the_canary_reads_behind_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel, executed on the CPU."""
    emulate_metal(monkeypatch)
    with pytest.raises(EmulationError, match="values"):
        exec(compile(shader_validation.CANARY, "canary", "exec"), {})


@needs_emulation
@pytest.mark.parametrize("feature", probe_metal.FEATURES)
def test_the_features_kernels_compute_what_the_probe_expects(
    monkeypatch: pytest.MonkeyPatch, feature: str
) -> None:
    emulate_metal(monkeypatch)
    assert probe_metal.works(feature)
    monkeypatch.setattr(mx, "ones", lambda shape, dtype: mx.full(shape, 2.0, dtype))
    assert not probe_metal.works(feature)


@without_metal
def test_without_metal_the_probe_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe_metal.main([]) == 1
    assert capfd.readouterr().out == "metal=false\n"


def emulate_metal(patch: pytest.MonkeyPatch) -> None:
    """Let `mx.fast.metal_kernel` run on the CPU, checked."""

    def metal_kernel(*, name: str, input_names: list[str], output_names: list[str], source: str) -> object:
        kernel = Source(name, tuple(input_names), tuple(output_names), source)

        def call(
            *, stream: object, template: list[tuple[str, mx.Dtype]] | None = None, **options: object
        ) -> object:
            return Emulator()(Dispatch(kernel, template=template or (), **options))  # type: ignore[arg-type]

        return call

    patch.setattr(mx.fast, "metal_kernel", metal_kernel)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder: Path = tmp_path_factory.mktemp("exported")
    return export_kernels.write(folder / "new")


def test_every_kernel_is_exported_once_with_its_prelude(exported: list[Path]) -> None:
    texts = [path.read_text() for path in exported]
    assert len(set(texts)) == len(set(exported)) == len(texts)
    for text in texts:
        assert text.startswith(PRELUDE)
        assert text.count("[[kernel]] void custom_kernel_mlx_eval_") == 1


def test_every_metal_file_of_ours_is_part_of_an_exported_kernel(exported: list[Path]) -> None:
    texts = [path.read_text() for path in exported]
    unused = [
        file.name
        for file in sorted(METAL.glob("*.metal"))
        if not any(file.read_text() in text for text in texts)
    ]
    assert unused == []


def test_the_prelude_is_where_the_compiler_is_sent() -> None:
    assert (export_kernels.include_folder() / PRELUDE.split('"')[1]).is_file()


def test_what_the_compiler_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a compiler in the place of Xcode's that refuses kernels of bfloat16."""
    compiler = tmp_path / "bin" / "xcrun"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor word in "$@"; do\n'
        '  case "$word" in *bfloat16*.metal) exit 1;; esac\ndone\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=":")
    assert export_kernels.main([str(tmp_path / "out"), "--compile"]) == 1
    paths = list((tmp_path / "out").glob("*.metal"))
    refused = [path for path in paths if "bfloat16" in path.name]
    assert 0 < len(refused) < len(paths)
    out, err = capfd.readouterr()
    assert sorted(err.splitlines()) == sorted(f"refused: {path}" for path in refused)
    assert f"{len(paths) - len(refused)} of {len(paths)} compiled" in out
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == len(paths)
    assert all(call.startswith("-sdk macosx metal -std=metal3.1 ") for call in calls)
