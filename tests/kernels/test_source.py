"""What holds for the Metal source of every kernel, whatever it computes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.examples import Example, examples
from tests.kernels.ways import Recorder
from tests.msl.emulate import Emulator, on_every_schedule
from tests.msl.exported import exported
from tests.msl.signature import generated
from tests.msl.static import findings

EXAMPLES = list(examples())
MOST_THREADS = 256
"""Of a group: a kernel with many registers may not get Metal's 1,024."""
MOST_MEMORY = 32 * 1024
"""Bytes of threadgroup memory that every Apple GPU has."""


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_static_passes_find_nothing(emulated: None, example: Example) -> None:
    for dispatch in example.dispatches():
        assert findings(dispatch) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_text_that_runs_is_the_one_mlx_makes(example: Example) -> None:
    for dispatch in example.dispatches():
        assert generated(dispatch).text == exported(dispatch).text


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.name.endswith("float32")], ids=str)
def test_three_schedules_give_the_same_bits(emulated: None, example: Example) -> None:
    """Threads and groups forward, backward and shuffled, over other fillings of the memory."""
    on_every_schedule(example.call)


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_groups_fit_every_gpu(emulated: None, example: Example) -> None:
    recorder = Recorder(emulator := Emulator())
    example.call(recorder)
    for dispatch, report in zip(recorder.dispatches, emulator.reports, strict=True):
        assert np.prod(dispatch.threadgroup) <= MOST_THREADS
        assert report.threadgroup_bytes <= MOST_MEMORY
        assert not report.errors
