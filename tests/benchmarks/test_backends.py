from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.side_by_side.backends import CountingModel, Ours, warm_up
from benchmarks.side_by_side.bare import forward_shapes
from benchmarks.side_by_side.works import Work
from tests.benchmarks.works import ROLLING, WORK
from tests.tiny import bpe_tokenizer, tiny_model, write_directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval")
    directory: Path = tmp_path_factory.mktemp("model")
    write_directory(directory, bpe_tokenizer())
    return directory


@pytest.mark.parametrize("work", [WORK, ROLLING], ids=["pairs", "pages"])
def test_the_plan_of_the_last_call_is_at_hand(model: Path, work: Work) -> None:
    backend = Ours(str(model), "auto")
    warm_up(backend, work)
    assert len(backend.score(work)) == len(work.texts)
    plan = backend.scorer.plan_made
    assert backend.computed().tokens == plan.planned_tokens > 0
    assert len(list(forward_shapes(plan, backend.scorer.requests))) == plan.num_forwards
    assert all(taken.wall > 0 for taken in backend.scorer.seconds.values())
    assert backend.computed().tokens == 0


def test_what_runs_through_a_model_is_counted_at_its_call() -> None:
    model = tiny_model()
    counting = CountingModel(model)
    assert counting.layers is model.layers
    for rows in (1, 3):
        counting(mx.ones((rows, 4), dtype=mx.int32))
    found = counting.take()
    assert (found.tokens, found.forwards, found.padding) == (16, 2, None)
    assert counting.take().tokens == 0
