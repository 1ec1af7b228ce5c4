"""What is scored: texts as lm-eval asks for them, the same for every backend. Knows lm-eval's tasks, no model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

REFERENCE: Final = "MLX_EVAL_REFERENCE"
Kind = Literal["loglikelihood", "loglikelihood_rolling"]


QUIET: Final = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
"""Read by these packages when they are imported."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of one kind, in lm-eval's order."""

    name: str
    kind: Kind
    texts: tuple[tuple[str, ...], ...]
    """(context, continuation) of each request, or (text,) for rolling ones."""
    questions: tuple[int, ...]
    """The question that each request belongs to, counted from 0."""
    max_length: int | None = None
    """Window of the backends that take one; None for the model's own."""

    @property
    def num_questions(self) -> int:
        """How many questions there are."""
        return len(set(self.questions))

    def first(self, num_questions: int) -> Work:
        """The requests of the first questions only."""
        kept = [index for index, question in enumerate(self.questions) if question < num_questions]
        return replace(
            self,
            texts=tuple(self.texts[index] for index in kept),
            questions=tuple(self.questions[index] for index in kept),
        )

    def digest(self) -> str:
        """Equal for equal requests."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the fields are others, or do not fit together.
        """
        fields = json.loads(text)
        missing = {"name", "kind", "texts", "questions"} - set(fields)
        if missing:
            raise ValueError(f"requests need the fields name, kind, texts and questions; without {missing}")
        work = cls(
            **{**fields, "texts": tuple(map(tuple, fields["texts"])), "questions": tuple(fields["questions"])}
        )
        width = {"loglikelihood": 2, "loglikelihood_rolling": 1}.get(work.kind)
        if width is None or any(len(texts) != width for texts in work.texts):
            raise ValueError(
                "kind is loglikelihood with pairs of texts, or loglikelihood_rolling with single ones"
            )
        if len(work.texts) != len(work.questions):
            raise ValueError("there must be one question's number for each request")
        return work


@dataclass(frozen=True, slots=True)
class Recipe:
    """How lm-eval makes a work."""

    task: str
    num_fewshot: int
    limit: int | None
    """Documents; None for all."""
    peer_questions: int | None
    """Questions that a peer answers unless told otherwise; None for all."""
    peer_batch_size: int = 8
    """Rows that a peer computes together: what it is fastest with, or its memory allows."""
    max_length: int | None = None
    wanted_ratio: float | None = None
    """CPU seconds of `mlx_lm` over ours that this project aims at."""


RECIPES: Final[Mapping[str, Recipe]] = {
    # A peer needs the better part of an hour for the first, several minutes for the second. Its logits of one
    # row of 3,000 tokens take 0.6 GB, several times over, and more rows at once are no faster.
    "mmlu_european_history": Recipe(
        "local_mmlu_high_school_european_history", 5, 100, 10, 1, wanted_ratio=10.0
    ),
    "mmlu_anatomy": Recipe("local_mmlu_anatomy", 5, 100, 10, wanted_ratio=6.0),
    # one to five minutes each, so whole
    "hellaswag": Recipe("local_hellaswag", 0, 100, None, wanted_ratio=2.0),
    "arc_easy": Recipe("local_arc_easy", 0, 200, None, wanted_ratio=2.5),
    # one page at a time, so that a peer pads none to the length of the longest
    "wikitext": Recipe("local_wikitext", 0, 3, None, 1, max_length=2048),
}
"""The works of the comparison, by name."""


def reference_folder() -> Path:
    """The folder that the environment names.

    Raises:
        SystemExit: it names none.
    """
    folder = os.environ.get(REFERENCE)
    if not folder:
        raise SystemExit(
            f"set {REFERENCE} to the folder that holds offline_tasks.py, and the rows in its data"
        )
    return Path(folder)


def build_works(recipes: Mapping[str, Recipe], reference: Path) -> dict[str, Work]:
    """Have lm-eval make the requests of works, from the rows of a reference folder.

    Args:
        recipes: by the work's name.
        reference: a folder with `offline_tasks.py`, which writes task files over the rows in its `data`.

    Raises:
        subprocess.CalledProcessError: the task files could not be written.
    """
    with offline_tasks(reference) as manager:
        return {name: _record(name, recipe, manager) for name, recipe in recipes.items()}


@contextmanager
def offline_tasks(reference: Path) -> Iterator[Any]:
    """lm-eval's task manager for the tasks of a reference folder, as long as the block runs.

    Args:
        reference: a folder with `offline_tasks.py`, which writes task files over the rows in its `data`.

    Raises:
        subprocess.CalledProcessError: the task files could not be written.
    """
    os.environ.update(QUIET)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from mlx_eval.harness.tasks import task_manager

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(reference / "offline_tasks.py"), "--out", folder],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield task_manager(folder, include_defaults=False)


def requests_of(recipe: Recipe, manager: Any) -> tuple[str, list[Any]]:
    """What lm-eval's evaluator asks of a backend for one recipe.

    Args:
        recipe: of a task that asks requests of one kind.
        manager: lm-eval's task manager.

    Returns:
        The kind, and lm-eval's instances in its order.
    """
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    asked: dict[str, list[Any]] = {}

    class Recorder(LM):  # type: ignore[misc]  # lm_eval has no type marker
        """Answers nothing of worth and remembers the questions."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            asked.setdefault("loglikelihood", []).extend(requests)
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            asked.setdefault("loglikelihood_rolling", []).extend(requests)
            return [0.0] * len(requests)

        def generate_until(self, requests: list[Any]) -> list[str]:
            asked.setdefault("generate_until", []).extend(requests)
            return [""] * len(requests)

    simple_evaluate(
        model=Recorder(),
        tasks=[recipe.task],
        num_fewshot=recipe.num_fewshot,
        limit=recipe.limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    ((kind, requests),) = asked.items()
    return kind, requests


def _record(name: str, recipe: Recipe, manager: Any) -> Work:
    """The requests of a recipe as a work."""
    kind, requests = requests_of(recipe, manager)
    number: dict[Any, int] = {}
    return Work(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # one of the two scoring methods' names
        texts=tuple(tuple(request.args) for request in requests),
        questions=tuple(number.setdefault(request.doc_id, len(number)) for request in requests),
        max_length=recipe.max_length,
    )
