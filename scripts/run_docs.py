#!/usr/bin/env python3
"""Run what README.md and docs/ show, and compare or write the output below it.

    python scripts/run_docs.py                  # run everything that is marked, say what differs
    python scripts/run_docs.py --write          # put the real output in the place of what is there
    python scripts/run_docs.py README.md        # one page

A page is run from its top to its end in an empty folder. A block with a title, ```toml title="a.toml", is
written there as a file. Behind the comment <!-- run --> a `console` block has commands behind `$ ` with their
standard output below; a `python` block is a program, and a `text` block right after it its output. What is
marked <!-- run: slow --> takes more than some seconds. Nothing else is run. Needs no network.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/*.md", "docs/*/*.md")
BLOCK = re.compile(
    r"(?P<mark><!-- run(?P<slow>: slow)? -->\n)?"
    r"```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```\n"
    r"(?P<gap>\n```text\n)?",
    re.DOTALL | re.MULTILINE,
)
OUTPUT = re.compile(r"(?P<body>.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Shown:
    """Something that was run: what the page shows of it, and what came out."""

    command: str
    start: int
    """Where the shown output begins in the page."""
    shown: str
    real: str

    @property
    def differs(self) -> bool:
        """Whether more than numbers, times and the widths of columns differ."""
        return _shape(self.shown) != _shape(self.real)


def pages() -> list[Path]:
    """README.md and all of docs/."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def run_page(page: Path, *, with_slow: bool) -> Iterator[Shown]:
    """Run a page's blocks; those marked slow only when asked.

    Raises:
        RuntimeError: a command failed.
    """
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for block in BLOCK.finditer(text):
            if block["title"]:
                path = Path(folder, block["title"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block["body"], encoding="utf-8")
            if not block["mark"] or (block["slow"] and not with_slow):
                continue
            if block["kind"] == "console":
                for command, start, shown in _commands(block["body"], block.start("body")):
                    yield Shown(command, start, shown, _run(["bash", "-c", command], folder))
            elif block["kind"] == "python":
                output = OUTPUT.match(text, block.end()) if block["gap"] else None
                real = _run([sys.executable, "-c", block["body"]], folder)
                if output:
                    yield Shown(f"the program {block['title'] or ''}", output.start(), output["body"], real)
            else:
                raise RuntimeError(f"{page}: a block of kind {block['kind']} cannot be run")


def _commands(body: str, offset: int) -> Iterator[tuple[str, int, str]]:
    """Each command of a console block, where its output begins, and that output."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    place = offset + len(parts[0])
    for part in parts[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command is not None
        yield command[0].rstrip("\n"), place + 2 + command.end(), part[command.end() :]
        place += 2 + len(part)


def _run(line: list[str], folder: str) -> str:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": f"{folder}/.cache",
    }
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{line[-1]}\nended with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _shape(text: str) -> list[str]:
    plain = re.sub(r"\d[\d.,:T-]*", "#", text)
    return re.sub(r"[ -]+|:?-+:?", " ", plain).split()


def main() -> int:
    """Run pages from the command line; status 1 when one shows something else than it should."""
    parser = argparse.ArgumentParser(description="Run what the documentation shows.")
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="put the real output in the page")
    arguments = parser.parse_args()
    status = 0
    for page in arguments.pages or pages():
        found = list(run_page(page, with_slow=True))
        text = page.read_text(encoding="utf-8")
        for one in reversed(found):
            text = text[: one.start] + one.real + text[one.start + len(one.shown) :]
            if one.differs:
                status = 1
                print(f"{page}: {one.command}\nshown:\n{one.shown}\nreal:\n{one.real}")
        if arguments.write:
            page.write_text(text, encoding="utf-8")
        print(f"{page}: {len(found)} outputs")
    return 0 if arguments.write else status


if __name__ == "__main__":
    raise SystemExit(main())
