from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.side_by_side.backends import Computed, Seconds
from benchmarks.side_by_side.report import FLOOR_NATS, agree, make_line, plan_table, table, tolerance
from benchmarks.side_by_side.store import Store, model_digest
from benchmarks.side_by_side.worker import Measurement, PlanFigures, context_share
from tests.benchmarks.works import ROLLING, WORK

ANSWERS = tuple((-float(place), place % 2 == 0) for place in range(len(WORK.texts)))
OURS = Measurement(
    wall=2.0,
    cpu=4.0,
    computed=Computed(tokens=100, padding=5, forwards=3),
    peak_mlx_bytes=1000,
    peak_rss_bytes=2000,
    share=1.0,
    scored_tokens=(2,) * len(ANSWERS),
    answers=ANSWERS,
    plan=PlanFigures(90, 100, 5, 3, 70, {"plan": Seconds(0.1, 0.1), "bare": Seconds(1.6, 3.2)}),
)
HALF = replace(
    OURS,
    wall=5.0,
    cpu=10.0,
    computed=Computed(tokens=300, padding=None, forwards=8),
    share=0.5,
    scored_tokens=(2,) * 8,
    answers=ANSWERS[:8],
    plan=None,
)


def test_a_part_of_the_questions_is_scaled_by_its_share_of_the_contexts() -> None:
    line = make_line(WORK, "hf", HALF, 2, OURS)
    assert line.is_scaled
    assert (line.wall, line.cpu, line.tokens, line.forwards) == (10.0, 20.0, 600.0, 16.0)
    assert line.cpu_ratio == 20.0 / 4.0
    assert line.tokens_ratio == 600 / 100
    assert line.peak_rss_bytes == 2000
    assert "~20.0" in table([line])
    assert "2 of 4" in table([line])


def test_ours_is_not_scaled() -> None:
    line = make_line(WORK, "ours", OURS, WORK.num_questions, OURS)
    assert not line.is_scaled
    assert line.cpu_ratio == 1.0
    assert line.agreement is None
    assert "~" not in table([line])
    assert "1.250" in plan_table([line])  # 4.0 s over 3.2 s


def test_without_ours_there_is_no_ratio() -> None:
    line = make_line(WORK, "hf", HALF, 2, None)
    assert (line.cpu_ratio, line.tokens_ratio, line.agreement) == (None, None, None)


def test_answers_within_the_tolerance_agree() -> None:
    near = [(score + 0.9 * tolerance("hf", 2), greedy) for score, greedy in ANSWERS]
    found = agree("hf", near, ANSWERS, OURS.scored_tokens)
    assert (found.num_compared, found.num_beyond) == (len(ANSWERS), 0)
    assert found.worst_nats == pytest.approx(0.9 * tolerance("hf", 2))


@pytest.mark.parametrize("wrong", [(-3.0 + 2 * FLOOR_NATS, False), (-3.0, True), (float("nan"), False)])
def test_another_answer_is_counted(wrong: tuple[float, bool]) -> None:
    theirs = [*ANSWERS[:3], wrong, *ANSWERS[4:]]
    assert agree("hf", theirs, ANSWERS, OURS.scored_tokens).num_beyond == 1


def test_the_part_is_compared_with_the_same_requests_of_ours() -> None:
    agreement = make_line(WORK, "mlx_lm", HALF, 2, OURS).agreement
    assert agreement is not None
    assert (agreement.num_compared, agreement.num_beyond, agreement.worst_nats) == (8, 0, 0.0)


def test_rolling_scores_without_the_first_token_are_not_compared() -> None:
    both = replace(OURS, answers=ANSWERS[:2], scored_tokens=(9, 9))
    assert make_line(ROLLING, "mlx_lm", both, 2, both).agreement is None
    assert make_line(ROLLING, "hf", both, 2, both).agreement is not None


class Letters:
    """A backend that has a token for each letter."""

    @staticmethod
    def num_tokens(text: str) -> int:
        return len(text)


def test_the_share_counts_each_context_once_a_question() -> None:
    contexts = [WORK.texts[place][0] for place in (0, 4, 8, 12)]
    expected = len(contexts[0]) / sum(map(len, contexts))
    backend = Letters()
    assert context_share(WORK.first(1), WORK, backend) == pytest.approx(expected)  # type: ignore[arg-type]
    assert context_share(WORK, WORK, backend) == 1.0  # type: ignore[arg-type]


def test_a_stored_measurement_is_given_for_the_same_key_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "answers")
    assert store.read("work", "hf", {"threads": 2}) is None
    store.write("work", "hf", {"threads": 2}, HALF)
    store.write("work", "hf", {"threads": 1}, OURS)
    assert store.read("work", "hf", {"threads": 2}) == HALF
    assert store.read("work", "hf", {"threads": 1}) == OURS
    assert store.read("work", "hf", {"threads": 4}) is None
    assert store.read("other", "hf", {"threads": 2}) is None


def test_measurements_written_as_json_are_read_back() -> None:
    assert Measurement.from_dict(asdict(OURS)) == OURS


def test_other_weights_and_other_configurations_are_other_models(tmp_path: Path) -> None:
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(b"weights")
    config.write_text("{}")
    first = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("not part of the model")
    assert model_digest(tmp_path) == first
    weights.write_bytes(b"weighty")
    second = model_digest(tmp_path)
    config.write_text("{ }")
    assert len({first, second, model_digest(tmp_path)}) == 3
