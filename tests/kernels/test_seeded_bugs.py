"""Each bug that is seeded into a kernel is caught, and by what is there to catch it."""

from __future__ import annotations

import importlib.resources
from collections import Counter
from collections.abc import Callable

import pytest

from tests.kernels.conftest import SEEDED
from tests.kernels.seeded import (
    attention_barriers,
    attention_keys,
    attention_merge,
    attention_part,
    attention_scores,
    attention_tiles,
    linear_logprob,
    linear_tiles,
    logprob,
    softmax_row,
)
from tests.kernels.seeded.bugs import Bug, Detector, Trial, sent, what_notices
from tests.msl.static import findings

KERNELS = (
    logprob,
    softmax_row,
    attention_barriers,
    attention_part,
    attention_keys,
    attention_scores,
    attention_tiles,
    attention_merge,
    linear_logprob,
    linear_tiles,
)
BUGS: tuple[Bug, ...] = tuple(bug for kernel in KERNELS for bug in kernel.BUGS)
TRIALS = list({id(bug.trial): bug.trial for bug in BUGS}.values())


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_seeded_bug_is_caught(
    emulated: None, bug: Bug, record_property: Callable[[str, object], None]
) -> None:
    record_property(SEEDED, str(bug))
    if bug.caught_by is Detector.STATIC:
        assert findings(sent(bug.trial, bug.put_into))
        return
    noticed = what_notices(bug.trial, bug.put_into)
    assert bug.caught_by in noticed, "\n".join(noticed.values()) or "nothing notices it"


@pytest.mark.parametrize("trial", TRIALS, ids=range(len(TRIALS)))
def test_the_kernel_without_a_bug_passes_the_same_trial(emulated: None, trial: Trial) -> None:
    assert what_notices(trial) == {}


def test_the_static_passes_find_nothing_without_a_bug(emulated: None) -> None:
    for bug in BUGS:
        if bug.caught_by is Detector.STATIC:
            assert findings(sent(bug.trial)) == []


def test_every_metal_file_has_bugs() -> None:
    folder = importlib.resources.files("mlx_eval_kernels") / "metal"
    assert {bug.file for bug in BUGS} == {file.name for file in folder.iterdir()}


def test_bugs_have_names_of_their_own() -> None:
    assert max(Counter(map(str, BUGS)).values()) == 1
