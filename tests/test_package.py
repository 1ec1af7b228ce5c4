"""The package as a whole: what importing it costs, its public names, its modules, its wheel."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mlx_eval

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("lm_eval",)
"""Packages that an extra brings."""

BLOCK = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
"""Makes the optional packages look as if they were not installed."""


def python(code: str, timeout: float = 300) -> str:
    """What a process of its own prints."""
    line = [sys.executable, "-c", code]
    finished = subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_the_package_imports_nothing_else() -> None:
    code = """
import sys
before = set(sys.modules)
import mlx_eval
assert sorted(dir(mlx_eval)) == sorted(mlx_eval.__all__)
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names))
"""
    assert python(code).strip() == "['mlx_eval']"


def test_presets_and_summary_need_neither_mlx_nor_lm_eval() -> None:
    code = """
import sys
from mlx_eval import MMLU_PRESET, EvalPreset, Summary, summarize
print([name for name in ("mlx.core", "mlx_lm", "transformers", "lm_eval", "torch") if name in sys.modules])
"""
    assert python(code).strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    for name in mlx_eval.__all__:
        assert getattr(mlx_eval, name) is not None, name
    assert set(mlx_eval.__all__) == {*mlx_eval._HOMES, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = mlx_eval.load_modle  # type: ignore[attr-defined]  # that is the point


def test_every_public_name_is_documented() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if not pages[0].is_file():
        pytest.skip("not a checkout of the repository: no documentation beside the tests")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in mlx_eval.__all__ if name not in text] == []


def test_every_module_imports_first_and_without_lm_eval() -> None:
    """Each one with none of ours imported before, so that no circle hides behind a lucky order."""
    code = (
        BLOCK
        + """
import importlib, pkgutil
import mlx.core
import mlx_eval, mlx_eval_kernels
names = [
    module.name
    for package in (mlx_eval, mlx_eval_kernels)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    if not module.name.endswith("__main__") and ".demo_tasks" not in module.name
]
for name in names:
    for known in [known for known in sys.modules if known.split(".")[0] in ("mlx_eval", "mlx_eval_kernels")]:
        del sys.modules[known]
    importlib.import_module(name)
    assert not {"lm_eval", "transformers", "mlx_lm", "torch", "datasets"} & set(sys.modules), name
print(len(names))
"""
    )
    assert int(python(code)) > 60


def test_what_needs_lm_eval_says_how_to_install_it() -> None:
    code = (
        BLOCK
        + """
import mlx_eval
loaded = mlx_eval.load_model("demo")
for make in (
    lambda: mlx_eval.MLXEvalLM(loaded),
    lambda: mlx_eval.LmEvalAdapter(loaded).evaluate(["demo"]),
    lambda: mlx_eval.run_preset("demo", loaded),
    lambda: mlx_eval.run_preset(mlx_eval.MMLU_PRESET, loaded.model, loaded.tokenizer),
):
    try:
        make()
    except ImportError as error:
        print(error)
from mlx_eval.cli.main import main
text = mlx_eval.__file__
words = (["run", "demo", "--tasks", "demo"], ["tasks"], ["lm-eval", "run"], ["perplexity", "demo", "--text", text])
print([main(line) for line in words])
"""
    )
    *messages, statuses = python(code).splitlines()
    assert len(messages) == 4
    assert all("lm-eval" in line and "pip install 'mlx-eval[harness]'" in line for line in messages)
    assert statuses == "[1, 1, 1, 1]"


def test_the_wheel(tmp_path: Path) -> None:
    """Built without network; it holds what runs and nothing else."""
    pytest.importorskip("hatchling")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("not a checkout of the repository")
    line = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        metadata = next(name for name in names if name.endswith("METADATA"))
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "mlx_eval",
        "mlx_eval_kernels",
    }
    for needed in (
        "mlx_eval/py.typed",
        "mlx_eval_kernels/py.typed",
        "mlx_eval/__main__.py",
        "mlx_eval/models/demo/config.json",
        "mlx_eval/models/demo/model.safetensors",
        "mlx_eval/models/demo/tokenizer.json",
        "mlx_eval/harness/demo_tasks/demo.yaml",
        "mlx_eval/harness/demo_tasks/choice_test.jsonl",
    ):
        assert needed in names
    assert sizes["mlx_eval/models/demo/model.safetensors"] <= 2 * 2**20
    for package, place in (("mlx_eval", ROOT), ("mlx_eval_kernels", ROOT / "kernels")):
        sources = {
            path.relative_to(place).as_posix()
            for suffix in ("py", "metal")
            for path in (place / package).rglob(f"*.{suffix}")
        }
        assert sources <= set(names)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "unpacked")!r})
import mlx_eval_kernels
from mlx_eval_kernels.launch import read
assert mlx_eval_kernels.__file__.startswith({str(tmp_path)!r})
print(len(read("logprob.metal")))
"""
    assert int(python(code)) > 0
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "test_" in Path(name).name and name.endswith(".py")]
    assert "mlx-eval = mlx_eval.cli.main:main" in entry_points
    assert "mlx = mlx_eval.harness.register:RegisteredLM" in entry_points


def test_the_entry_point_loads_the_backend() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    code = """
from importlib.metadata import entry_points
(point,) = entry_points(group="lm_eval.models", name="mlx")
from lm_eval.api.model import TemplateLM
print(issubclass(point.load(), TemplateLM))
"""
    assert python(code).strip() == "True"
