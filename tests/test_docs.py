"""What README.md and docs/ show runs, and prints what they show but for the numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "run_docs.py"
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]

pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not a checkout of the repository")


@pytest.fixture(scope="module")
def run_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_docs"] = module  # where dataclasses look for a class's module
    spec.loader.exec_module(module)
    return module


def check(run_docs: ModuleType, page: str, with_slow: bool) -> None:
    pytest.importorskip("lm_eval")
    for shown in run_docs.run_page(ROOT / page, with_slow=with_slow):
        assert not shown.differs, f"{page}, {shown.command}: shown\n{shown.shown}\nreal\n{shown.real}"


@pytest.mark.parametrize("page", PAGES)
def test_quick_examples(run_docs: ModuleType, page: str) -> None:
    check(run_docs, page, with_slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_all_examples(run_docs: ModuleType, page: str) -> None:
    check(run_docs, page, with_slow=True)


def test_differences_are_noticed(run_docs: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run -->\n```console\n$ printf 'a  1.5\\nb'\na 27\nb\n$ echo c\nd\n```\n"
        '```toml title="x/y"\nhere\n```\n'
        "<!-- run -->\n```python\nprint(open('x/y').read())\n```\n\n```text\nhere\n```\n"
        "<!-- run: slow -->\n```console\n$ echo slow\n```\n"
    )
    found = list(run_docs.run_page(page, with_slow=False))
    assert [shown.differs for shown in found] == [False, True, False]
    assert len(list(run_docs.run_page(page, with_slow=True))) == 4
    page.write_text("<!-- run -->\n```console\n$ false\n```\n")
    with pytest.raises(RuntimeError, match="status 1"):
        list(run_docs.run_page(page, with_slow=True))


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
