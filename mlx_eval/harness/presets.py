"""Presets: what published scores of a benchmark were made with, as lm-eval's arguments.

Knows lm-eval's names for tasks and options; imports nothing of it, and knows no model. No preset but
`demo` applies a chat template: published scores of base models go without, those of chat models with
one, so that is for the caller to add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final, TypeGuard

from mlx_eval.errors import InvalidOptionError, UnknownNameError, unknown_name

EXTRA_ARGUMENTS: Final = frozenset(
    {
        "bootstrap_iters",
        "cache_requests",
        "check_integrity",
        "confirm_run_unsafe_code",
        "delete_requests_cache",
        "fewshot_random_seed",
        "metadata",
        "numpy_random_seed",
        "predict_only",
        "random_seed",
        "rewrite_requests_cache",
        "samples",
        "task_manager",
        "torch_random_seed",
        "use_cache",
        "write_out",
    }
)
"""Parameters of lm-eval's `simple_evaluate` (0.4.12 and 0.4.13) that a preset has no field for, but for those that
describe a model to be loaded or belong to one run."""

_PASSED_ON: Final = (
    "num_fewshot",
    "batch_size",
    "limit",
    "fewshot_as_multiturn",
    "system_instruction",
    "gen_kwargs",
)
"""Fields that lm-eval knows by the same name and that are left out when None."""


@dataclass(frozen=True, slots=True)
class EvalPreset:
    """One evaluation, ready to be run on any model.

    Raises:
        InvalidOptionError: a value that makes no sense; the message names the preset and the field.
        UnknownNameError: a name in `extra` that lm-eval does not know.
    """

    name: str
    task: str | Sequence[str]
    """lm-eval's names of tasks, groups or tags; patterns such as `mmlu_*` and YAML paths too.
    A list is kept as a tuple."""
    num_fewshot: int | None = None
    """Examples in the prompt; None leaves it to the task."""
    batch_size: int | str | None = None
    """Rows a forward pass, or `auto`."""
    limit: int | float | None = None
    """Documents of each task: a number of 1 or more, or a share between 0 and 1."""
    apply_chat_template: bool | str = False
    """Whether to apply the model's chat template, or the name of one of several."""
    fewshot_as_multiturn: bool | None = None
    system_instruction: str | None = None
    gen_kwargs: str | Mapping[str, Any] | None = field(default=None, hash=False)
    """Generation arguments laid over the task's own."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other arguments of lm-eval's `simple_evaluate`, by their names there (`EXTRA_ARGUMENTS`)."""
    description: str = ""
    """What is measured, and whose published scores the setting is that of."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidOptionError(f"a preset's name must be a text that is not empty, not {self.name!r}")
        _check_task(self)
        if isinstance(self.task, list):
            object.__setattr__(self, "task", tuple(self.task))
        _check_numbers(self)
        if _is_number(self.limit) and self.limit >= 1:
            object.__setattr__(self, "limit", int(self.limit))
        _check_texts(self)
        _check_extra(self)
        # Own copies: what the caller does to theirs later must not change a frozen preset.
        object.__setattr__(self, "extra", dict(self.extra))
        if isinstance(self.gen_kwargs, Mapping):
            object.__setattr__(self, "gen_kwargs", dict(self.gen_kwargs))

    @property
    def tasks(self) -> tuple[str, ...]:
        """Every task name, one by one."""
        names = (self.task,) if isinstance(self.task, str) else self.task
        return tuple(part.strip() for name in names for part in name.split(",") if part.strip())

    def replace(self, **changes: Any) -> EvalPreset:
        """The same preset with other values in the fields named, validated again.

        Raises:
            InvalidOptionError: as for a new preset.
            UnknownNameError: a preset has no such field.
        """
        known = [item.name for item in fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name("field of a preset", name, known)
        return EvalPreset(**{name: getattr(self, name) for name in known} | changes)

    def to_lm_eval_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for lm-eval's `simple_evaluate`; what is None is left out."""
        arguments: dict[str, Any] = {"tasks": list(self.tasks)}
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                arguments[name] = dict(value) if isinstance(value, Mapping) else value
        if self.apply_chat_template:
            arguments["apply_chat_template"] = self.apply_chat_template
        arguments.update({name: value for name, value in self.extra.items() if value is not None})
        return arguments


FIELD_NAMES: Final = tuple(item.name for item in fields(EvalPreset))
"""The names of a preset's fields, in order."""


def _bad(preset: EvalPreset, name: str, expected: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"preset {preset.name!r}: {name} must be {expected}, not {getattr(preset, name)!r}"
    )


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_task(preset: EvalPreset) -> None:
    task = preset.task
    names = task if isinstance(task, tuple | list) else [task]
    if not all(isinstance(name, str) for name in names):
        raise _bad(preset, "task", "a task name or several")
    if not preset.tasks:
        raise _bad(preset, "task", "at least one task name")


def _check_numbers(preset: EvalPreset) -> None:
    shots, rows, limit = preset.num_fewshot, preset.batch_size, preset.limit
    if shots is not None and not (_is_whole(shots) and shots >= 0):
        raise _bad(preset, "num_fewshot", "a whole number of 0 or more")
    if rows is not None and rows != "auto" and not (_is_whole(rows) and rows >= 1):
        raise _bad(preset, "batch_size", "a whole number of 1 or more, or 'auto'")
    if limit is not None and not (
        _is_number(limit) and math.isfinite(limit) and (0 < limit < 1 or (limit >= 1 and limit == int(limit)))
    ):
        raise _bad(preset, "limit", "a whole number of 1 or more, or a share between 0 and 1")


def _check_texts(preset: EvalPreset) -> None:
    template = preset.apply_chat_template
    if not isinstance(template, bool) and not (isinstance(template, str) and template):
        raise _bad(preset, "apply_chat_template", "true, false or the name of a template")
    if preset.fewshot_as_multiturn is not None and not isinstance(preset.fewshot_as_multiturn, bool):
        raise _bad(preset, "fewshot_as_multiturn", "true or false")
    if preset.system_instruction is not None and not isinstance(preset.system_instruction, str):
        raise _bad(preset, "system_instruction", "a text")
    if preset.gen_kwargs is not None and not isinstance(preset.gen_kwargs, str | Mapping):
        raise _bad(preset, "gen_kwargs", "a text such as 'temperature=0.7,top_p=0.9' or a table")
    if not isinstance(preset.description, str):
        raise _bad(preset, "description", "a text")


def _check_extra(preset: EvalPreset) -> None:
    if not isinstance(preset.extra, Mapping):
        raise _bad(preset, "extra", "a table of lm-eval's arguments")
    for name in preset.extra:
        if name in {"model", "tasks"}:
            raise InvalidOptionError(
                f"preset {preset.name!r}: {name!r} cannot be in extra; a preset names its tasks in task "
                "and is given the model when it runs"
            )
        if name in FIELD_NAMES:
            raise InvalidOptionError(
                f"preset {preset.name!r}: {name!r} cannot be in extra; it is a field of the preset itself"
            )
        if name not in EXTRA_ARGUMENTS:
            error = unknown_name("argument of lm-eval", str(name), EXTRA_ARGUMENTS)
            raise UnknownNameError(f"preset {preset.name!r}: {error}")


# Open LLM Leaderboard v1 (2023-2024): ARC 25, HellaSwag 10, MMLU 5, TruthfulQA 0, Winogrande 5, GSM8K 5
# shots. Open LLM Leaderboard v2 (2024-2025): IFEval 0, BBH 3, MATH 4, GPQA 0, MMLU-Pro 5.
# Where the task's own file fixes the shots, num_fewshot stays None: a task's 0 cannot be overridden
# in lm-eval, and its other numbers belong to the examples that it brings along.

MMLU_PRESET: Final = EvalPreset(
    name="mmlu",
    task="mmlu",
    num_fewshot=5,  # Hendrycks et al. 2020 (arXiv 2009.03300); Open LLM Leaderboard v1
    description="57 subjects, four choices; 5 shots as in the paper and Open LLM Leaderboard v1",
)

ARCEASY_PRESET: Final = EvalPreset(
    name="arc_easy",
    task="arc_easy",
    num_fewshot=0,  # LLaMA (arXiv 2302.13971, table 3)
    description="grade-school science, the easy part; 0 shots as in the LLaMA paper",
)

WIKITEXT_PRESET: Final = EvalPreset(
    name="wikitext",
    task="wikitext",
    num_fewshot=0,  # perplexity of running text: there are no examples to show
    description="perplexity of WikiText-2's test pages, by word and by byte",
)

_LEADERBOARD: Final = (
    EvalPreset(
        name="hellaswag",
        task="hellaswag",
        num_fewshot=10,  # Open LLM Leaderboard v1
        description="the likeliest ending; 10 shots as in Open LLM Leaderboard v1 (acc_norm)",
    ),
    EvalPreset(
        name="arc_challenge",
        task="arc_challenge",
        num_fewshot=25,  # Open LLM Leaderboard v1; Llama 3's eval_details.md has 25 too
        description="grade-school science, the hard part; 25 shots as in Open LLM Leaderboard v1 (acc_norm)",
    ),
    EvalPreset(
        name="gsm8k",
        task="gsm8k",  # the task's own file says 5, as Open LLM Leaderboard v1 did
        description="grade-school mathematics; 5 shots (the task's own) as in Open LLM Leaderboard v1",
    ),
    EvalPreset(
        name="ifeval",
        task="ifeval",  # 0 in the task's own file; Zhou et al. 2023 (arXiv 2311.07911); Leaderboard v2
        description="instructions that can be checked by rule; 0 shots (fixed), meant for chat models",
    ),
    EvalPreset(
        name="mmlu_pro",
        task="mmlu_pro",  # 5 in the task's own file; Wang et al. 2024 (arXiv 2406.01574), with reasoning
        description="14 subjects, ten choices, with reasoning; 5 shots (the task's own) as in the paper",
    ),
    EvalPreset(
        name="gpqa_diamond_zeroshot",
        task="gpqa_diamond_zeroshot",  # 0 in the task's own file; Rein et al. 2023 (arXiv 2311.12022)
        description="graduate-level science, the diamond set; 0 shots (fixed); the data need a hub login",
    ),
    EvalPreset(
        name="hendrycks_math500",
        task="hendrycks_math500",
        num_fewshot=0,  # DeepSeek-R1 (arXiv 2501.12948) and later model cards; no training split for more
        description="500 competition problems; 0 shots as in current model cards",
    ),
    EvalPreset(
        name="humaneval",
        task="humaneval",  # 0 in the task's own file; Chen et al. 2021 (arXiv 2107.03374), pass@1
        # The task runs what the model wrote. confirm_run_unsafe_code is for the user to give, never here.
        description="Python functions, pass@1; 0 shots (fixed); needs --confirm_run_unsafe_code",
    ),
    EvalPreset(
        name="bbh",
        task="bbh",  # 3 with reasoning in the task's own file; Suzgun et al. 2022 (arXiv 2210.09261)
        description="27 hard tasks of BIG-Bench with reasoning; 3 shots (the task's own) as in the paper",
    ),
    EvalPreset(
        name="aime24",
        task="aime24",  # 0 in the task's own file; DeepSeek-R1 (arXiv 2501.12948) averages 64 samples
        description="30 AIME problems of 2024; 0 shots (fixed), one greedy answer: cards average many",
    ),
    EvalPreset(
        name="aime25",
        task="aime25",  # 0 in the task's own file; Qwen3 (arXiv 2505.09388) averages 64 samples
        description="30 AIME problems of 2025; 0 shots (fixed), one greedy answer: cards average many",
    ),
    EvalPreset(
        name="truthfulqa",
        task="truthfulqa_mc2",  # 0 in the task's own file; Open LLM Leaderboard v1 took mc2
        description="questions with common false answers, mc2; 0 shots (fixed) as in Open LLM Leaderboard v1",
    ),
    EvalPreset(
        name="winogrande",
        task="winogrande",
        num_fewshot=5,  # Open LLM Leaderboard v1; Llama 3's eval_details.md
        description="who a pronoun means; 5 shots as in Open LLM Leaderboard v1",
    ),
    EvalPreset(
        name="piqa",
        task="piqa",
        num_fewshot=0,  # LLaMA (arXiv 2302.13971, table 3)
        description="everyday physics; 0 shots as in the LLaMA paper",
    ),
    EvalPreset(
        name="boolq",
        task="boolq",
        num_fewshot=0,  # LLaMA (arXiv 2302.13971, table 3); Llama 3's eval_details.md
        description="yes or no about a passage; 0 shots as in the LLaMA papers",
    ),
    EvalPreset(
        name="demo",
        task="demo",
        apply_chat_template=True,  # the embedded model was trained on its own chat form
        description="the tasks that come with this package, for its embedded model; no network, no data",
    ),
)

PRESETS: Final[Mapping[str, EvalPreset]] = MappingProxyType(
    {preset.name: preset for preset in (MMLU_PRESET, ARCEASY_PRESET, WIKITEXT_PRESET, *_LEADERBOARD)}
)
"""Every preset that comes with the package, by name."""


def get_preset(name: str, extra_presets: Mapping[str, EvalPreset] | None = None) -> EvalPreset:
    """The preset called `name`; one of `extra_presets` goes before one of the package.

    Raises:
        UnknownNameError: there is none; the message gives the nearest names.
    """
    known = {**PRESETS, **(extra_presets or {})}
    if name not in known:
        raise unknown_name("preset", name, known, "`python -m mlx_eval presets` lists them all")
    return known[name]
