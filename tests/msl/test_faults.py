from __future__ import annotations

import pytest

from tests.msl.build import why_not
from tests.msl.emulate import EmulationError, Emulator, Order, on_every_schedule
from tests.msl.faults import BY_ORDER, FAULTS, OWN_UNSET, Fault

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

ALL = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


@ALL
def test_a_fault_is_found_and_named(fault: Fault) -> None:
    with pytest.raises(EmulationError) as raised:
        Emulator(timeout_seconds=fault.timeout_seconds)(fault.dispatch(faulty=True))
    assert any(error.startswith(fault.found) for error in raised.value.errors)


@ALL
@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_the_same_kernel_without_the_fault_runs(fault: Fault, order: Order) -> None:
    Emulator(order=order)(fault.dispatch(faulty=False))


@pytest.mark.parametrize("fault", [OWN_UNSET, BY_ORDER], ids=lambda fault: fault.name)
def test_what_no_single_access_shows_is_told_by_comparing_schedules(fault: Fault) -> None:
    Emulator()(fault.dispatch(faulty=True))
    with pytest.raises(EmulationError) as raised:
        on_every_schedule(lambda run: run(fault.dispatch(faulty=True)))
    assert raised.value.errors[0].startswith(fault.found)
    on_every_schedule(lambda run: run(fault.dispatch(faulty=False)))
