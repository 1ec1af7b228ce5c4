"""What is generated: prompts with lm-eval's arguments, the same for all backends. Knows its tasks, no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.side_by_side.works import Recipe, offline_tasks, requests_of
from mlx_eval import config


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """Prompts to be continued, one a question, in lm-eval's order."""

    name: str
    prompts: tuple[str, ...]
    options: tuple[dict[str, Any], ...]
    """lm-eval's generation arguments of each prompt: `until`, `max_gen_toks` and so on."""

    def first(self, num_questions: int | None) -> GenerationWork:
        """The first questions only; None: all."""
        return replace(self, prompts=self.prompts[:num_questions], options=self.options[:num_questions])

    def stops(self, index: int) -> tuple[str, ...]:
        """The texts that end an answer, the end-of-sequence token aside."""
        until = self.options[index].get("until") or ()
        return tuple(text for text in ([until] if isinstance(until, str) else until) if text)

    def digest(self) -> str:
        """Equal for equal requests."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> GenerationWork:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the fields are others, or do not fit together.
        """
        fields = json.loads(text)
        if set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"requests need the fields name, prompts and options; got {', '.join(fields)}")
        work = cls(fields["name"], tuple(fields["prompts"]), tuple(fields["options"]))
        if len(work.prompts) != len(work.options) or not work.prompts:
            raise ValueError("there must be prompts, and one set of options for each")
        if not all(options.get("max_gen_toks") for options in work.options):
            raise ValueError(
                "each set of options needs a max_gen_toks: backends differ in what they take for none"
            )
        return work


GENERATION_RECIPES: Final[Mapping[str, Recipe]] = {
    "gsm8k_cot": Recipe("local_gsm8k_cot", 8, 16, None, wanted_ratio=4.0),
    # answers run to a thousand tokens
    "bbh_navigate": Recipe("local_bbh_navigate", 3, 16, None, wanted_ratio=2.0),
    # each question has other examples before it: nothing to share
    "gsm8k": Recipe("local_gsm8k", 5, 8, None, wanted_ratio=1.1),
}
"""The works of the comparison, by name."""


def build_generation_works(recipes: Mapping[str, Recipe], reference: Path) -> dict[str, GenerationWork]:
    """Have lm-eval make the requests of works, from the rows of a reference folder.

    A task that sets no limit gets lm-eval's own, 256 tokens, written down: mlx_lm.evaluate would take 8,192.

    Args:
        recipes: by the work's name.
        reference: a folder with `offline_tasks.py`, which writes task files over the rows in its `data`.

    Raises:
        subprocess.CalledProcessError: the task files could not be written.
    """
    works = {}
    with offline_tasks(reference) as manager:
        for name, recipe in recipes.items():
            _, requests = requests_of(recipe, manager)
            prompts, options = zip(*(request.args for request in requests), strict=True)
            limited = tuple({"max_gen_toks": config.MAX_GEN_TOKS, **one} for one in options)
            works[name] = GenerationWork(name, prompts, limited)
    return works
