from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_eval_kernels import LogProb, logprob

from mlx_eval.engine import steps
from mlx_eval.engine.prefill import read_alone
from mlx_eval.engine.row_caches import PlainCaches, ReadRows
from mlx_eval.engine.sampling import Sampler, draw
from mlx_eval.engine.steps import RowBatch, RowStart, Token
from mlx_eval.records import Sampling
from tests.engine.decoders import (
    BATCHED,
    KEYS_ONLY,
    KINDS,
    VOCAB,
    Rows,
    allowed,
    random_model,
    random_prompts,
    script,
)
from tests.tiny import NEAR_TIE, TOLERANCE, ScriptedModel, oracle_generate, oracle_logprobs, tiny_model


def rows_of(kind: str = "llama", model: Any = None) -> Rows:
    return Rows(random_model(kind) if model is None else model, allowed(kind)[0])


def written(tokens: Sequence[Token]) -> dict[int, str]:
    """What each row of a `ScriptedModel` wrote."""
    found: dict[int, str] = {}
    for token in tokens:
        found[token.row] = found.get(token.row, "") + chr(token.token_id)
    return found


def assert_greedy(model: Any, prompts: Mapping[int, Sequence[int]], found: Mapping[int, list[Token]]) -> None:
    """Each token is the most probable one after those before it, up to a near-tie; so is its log-probability."""
    for row, tokens in found.items():
        ids = [token.token_id for token in tokens]
        logprobs = oracle_logprobs(model, [*prompts[row], *ids])[len(prompts[row]) - 1 :]
        for place, token in enumerate(tokens):
            given = logprobs[place, token.token_id]
            assert logprobs[place].max() - given < NEAR_TIE, f"row {row}, token {place}"
            assert abs(token.logprob - given) < TOLERANCE


# ---------------------------------------------------------------- steps


def test_a_step_is_sent_before_the_tokens_of_the_one_before_it_are_read() -> None:
    rows = Rows(model := ScriptedModel("abc", "xyz"))
    rows.join({0: script(0), 1: script(1)})
    del model.calls[:]
    assert rows.step() == []
    assert model.calls == [(2, 1)]
    assert written(rows.step()) == {0: "a", 1: "x"}
    assert model.calls == [(2, 1)] * 2
    assert written(rows.step()) == {0: "b", 1: "y"}
    assert rows.batch.num_steps == 3


def test_an_empty_batch_computes_nothing() -> None:
    rows = Rows(model := ScriptedModel("abc"))
    assert rows.step() == []
    assert rows.batch.catch_up() == []
    assert len(rows.batch) == rows.batch.nbytes == rows.batch.num_steps == 0
    assert model.calls == []


def test_the_last_token_of_a_prompt_is_read_in_a_step_with_the_rows_on_their_way() -> None:
    rows = Rows(model := ScriptedModel("abcdef", "xyz"))
    rows.join({0: script(0)})
    rows.step()
    rows.step()
    rows.join({1: script(1, b"a longer prompt")})
    del model.calls[:]
    assert written(rows.step()) == {0: "b"}
    assert model.calls == [(2, 1)]
    assert written(rows.step()) == {0: "c", 1: "x"}


def test_a_prompt_of_one_id_has_nothing_before_its_first_step() -> None:
    rows = Rows(ScriptedModel("abc", "xyz"))
    rows.join({0: script(0, b"12")})
    rows.step()
    rows.join({1: script(1, b"")})
    assert written(rows.step()) == {0: "a"}
    assert written(rows.step()) == {0: "b", 1: "x"}


@pytest.mark.parametrize("limit", [1, 3])
def test_no_step_is_sent_beyond_a_rows_limit(limit: int) -> None:
    rows = Rows(model := ScriptedModel("abcdef"))
    rows.join({0: script(0)}, limit)
    assert written(rows.finish()[0]) == {0: "abcdef"[:limit]}
    assert model.calls == [(1, 1)] * (1 + limit)
    assert rows.batch.num_discarded == 0


def test_a_row_at_its_limit_makes_room_before_its_last_token_is_read() -> None:
    rows = Rows(model := ScriptedModel("abcdef", "xyz"))
    rows.join({0: script(0), 1: script(1)}, {0: 50, 1: 1})
    del model.calls[:]
    assert rows.step() == []
    assert len(rows.batch) == 1
    assert written(rows.step()) == {0: "a", 1: "x"}
    assert written(rows.step()) == {0: "b"}
    assert model.calls == [(2, 1), (1, 1), (1, 1)]
    assert rows.batch.num_discarded == 0


def test_the_token_on_its_way_to_a_row_that_leaves_is_thrown_away() -> None:
    rows = Rows(ScriptedModel("abcdef", "xyzuvw"))
    rows.join({0: script(0), 1: script(1)})
    rows.step()
    assert written(rows.step()) == {0: "a", 1: "x"}
    rows.batch.leave({0})
    assert rows.batch.num_discarded == 1
    assert len(rows.batch) == 1
    assert written(rows.step()) == {1: "y"}
    rows.join({2: script(0)})
    assert written(rows.step()) == {1: "z"}
    assert written(rows.step()) == {1: "u", 2: "a"}
    rows.batch.leave({1, 2, 77})
    assert rows.batch.num_discarded == 3
    assert rows.step() == []
    assert len(rows.batch) == 0


def test_a_row_may_come_back_under_its_number() -> None:
    """What was on its way to it before is not taken for its first token."""
    rows = Rows(ScriptedModel("abcdef", "xyz"))
    rows.join({0: script(0), 1: script(1)})
    rows.step()
    assert written(rows.step()) == {0: "a", 1: "x"}
    rows.batch.leave({0})
    rows.join({0: (*script(0), ord("a"))})
    assert written(rows.step()) == {1: "y"}
    assert written(rows.step()) == {0: "b", 1: "z"}


def test_tokens_can_be_read_without_another_step() -> None:
    rows = Rows(model := ScriptedModel("abcdef"))
    rows.join({0: script(0)})
    rows.step()
    del model.calls[:]
    assert written(rows.batch.catch_up()) == {0: "a"}
    assert rows.batch.catch_up() == []
    assert model.calls == []
    assert rows.step() == []
    assert written(rows.step()) == {0: "b"}


@pytest.mark.parametrize("run_tokens", [0, 10**6])
@pytest.mark.parametrize("kind", BATCHED)
def test_rows_that_come_and_go_are_those_of_the_oracle(kind: str, run_tokens: int) -> None:
    """Rows longer and shorter than the window of 8, behind a stem and not; holes are filled and closed."""
    rows = rows_of(kind)
    model = rows.model
    prompts = {
        row: ids for row, ids in enumerate(random_prompts(4, stem=16, behind=5, others=4)) if len(ids) > 1
    }
    names = list(prompts)
    limits = {row: 4 + row for row in names}
    found: dict[int, list[Token]] = {row: [] for row in names}
    arrivals = [names[:3], [], names[3:4], [], names[4:]]
    leaving = [(), (), (names[0],), (), (), (names[3],)]
    for at in range(18):
        if at < len(arrivals) and arrivals[at]:
            rows.join({row: prompts[row] for row in arrivals[at]}, limits, run_tokens=run_tokens)
        if at < len(leaving):
            rows.batch.leave(leaving[at])
        for token in rows.step():
            found[token.row].append(token)
    gone = {names[0], names[3]}
    assert {row: len(tokens) for row, tokens in found.items() if row not in gone} == {
        row: limits[row] for row in names if row not in gone
    }
    assert_greedy(model, prompts, found)


def test_rows_in_half_precision_differ_from_rows_alone_by_rounding() -> None:
    model = tiny_model("llama", VOCAB, seed=3)
    model.set_dtype(mx.bfloat16)
    prompts = dict(enumerate(ids for ids in random_prompts(2) if len(ids) > 1))
    rows = rows_of(model=model)
    rows.join(prompts, 4)
    for tokens in rows.finish().values():
        row = tokens[0].row
        expected = oracle_logprobs(model, prompts[row])[-1]
        # logits of up to 20 have 8 bits
        assert abs(tokens[0].logprob - expected[tokens[0].token_id]) < 0.3
        assert tokens[0].logprob > expected.max() - 0.3


# ---------------------------------------------------------------- drafts


def test_a_step_with_drafts_gives_as_many_tokens_as_were_right_and_one_more() -> None:
    rows = Rows(model := ScriptedModel("abcdefgh", "xyzuvwst", "123456"))
    rows.join({0: script(0), 1: script(1), 2: script(2)})
    rows.step()
    assert written(rows.batch.catch_up()) == {0: "a", 1: "x", 2: "1"}
    del model.calls[:]
    tokens = rows.verify({0: list(b"bcd"), 1: list(b"yX")})
    assert written(tokens) == {0: "bcde", 1: "yz", 2: "2"}
    assert model.calls == [(3, 4)]
    assert written(rows.verify({2: list(b"QQ"), 1: list(b"uv")})) == {0: "f", 1: "uvw", 2: "3"}
    rows.step()
    assert written(rows.step()) == {0: "g", 1: "s", 2: "4"}
    assert rows.batch.num_discarded == 0


def test_drafts_are_cut_where_their_row_reaches_its_limit() -> None:
    rows = Rows(model := ScriptedModel("abcdefgh", "xyzuvwst"))
    rows.join({0: script(0), 1: script(1)}, {0: 50, 1: 3})
    rows.step()
    rows.batch.catch_up()
    del model.calls[:]
    drafts = {0: list(b"bcd"), 1: list(b"yzuvw"), 2: [1]}
    assert rows.batch.fitting(drafts) == {0: list(b"bcd"), 1: list(b"y")}
    assert written(rows.verify(drafts)) == {0: "bcde", 1: "yz"}
    assert model.calls == [(2, 4)]
    assert len(rows.batch) == 1
    assert rows.batch.fitting({1: [1]}) == {}


def test_a_row_with_one_token_left_has_no_drafts() -> None:
    rows = Rows(ScriptedModel("abcdefgh", "xyz"))
    rows.join({0: script(0), 1: script(1)}, 2)
    rows.step()
    rows.batch.catch_up()
    assert rows.batch.fitting({0: list(b"bc"), 1: []}) == {}


@pytest.mark.parametrize(
    "length",
    [
        1,
        5,
        6,
        7,
    ],
)
def test_no_draft_goes_beyond_the_positions_that_a_model_has(length: int) -> None:
    """8 of them; the other row has read so many tokens and one more, and has left."""
    rows = Rows(ScriptedModel("abcdefgh", "xyz"))
    rows.batch = RowBatch(rows.model, rows.caches, 8)
    rows.join({0: script(0), 1: script(1, b"1" * length)}, {0: 3, 1: 1})
    rows.step()
    rows.batch.catch_up()
    assert len(rows.batch) == 1
    for drafts in rows.batch.fitting({0: list(b"bcdefg")}).values():
        assert len(drafts) <= min(2, 8 - 2 - 1)


def test_a_row_that_reaches_its_limit_within_a_draft_leaves() -> None:
    rows = Rows(ScriptedModel("abcdefgh"))
    rows.join({0: script(0)}, 4)
    rows.step()
    rows.batch.catch_up()
    assert written(rows.verify({0: list(b"bcdefg")})) == {0: "bcd"}
    assert len(rows.batch) == 0
    assert rows.step() == []


def test_drafts_wait_for_the_step_on_its_way() -> None:
    rows = Rows(ScriptedModel("abc"))
    rows.join({0: script(0)})
    rows.step()
    with pytest.raises(ValueError, match="on its way"):
        rows.verify({0: [1]})


@pytest.mark.parametrize("kind", KEYS_ONLY)
def test_wrong_drafts_leave_nothing_behind(kind: str) -> None:
    """Plain steps, right and wrong drafts in turn, behind a stem and not: the oracle's tokens and scores."""
    rows = rows_of(kind)
    model, rng = rows.model, np.random.default_rng(0)
    prompts = {row: ids for row, ids in enumerate(random_prompts(5, behind=3, others=3)) if len(ids) > 1}
    known = {row: oracle_generate(model, ids, 20)[0] for row, ids in prompts.items()}
    rows.join(prompts, 16, run_tokens=0)
    found: dict[int, list[Token]] = {row: [] for row in prompts}
    num_row_steps = 0
    for at in range(40):
        num_row_steps += len(rows.batch)
        if not len(rows.batch):
            break
        drafts: dict[int, list[int]] = {}
        for row in prompts:
            right = known[row][len(found[row]) :][: int(rng.integers(0, 5))]
            if right and len(found[row]) < 16 and rng.random() < 0.7:
                if rng.random() < 0.5:
                    right[-1] = (right[-1] + 1) % VOCAB
                drafts[row] = right
        for token in rows.verify(drafts) if at % 3 else [*rows.step(), *rows.batch.catch_up()]:
            found[token.row].append(token)
    assert {len(tokens) for tokens in found.values()} == {16}
    assert num_row_steps < 12 * len(prompts), "right drafts save steps"
    assert_greedy(model, prompts, found)


def test_a_row_that_samples_draws_one_token_beside_drafts() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    model = ScriptedModel("abcdefgh", "xyzuvwst", spread=0.1)
    alone = Rows(model)
    alone.join({1: script(1)}, 4, sampling={1: sampling})
    expected = alone.finish()[1]
    rows = Rows(model)
    rows.join({0: script(0), 1: script(1)}, 4, sampling={1: sampling})
    rows.step()
    found = rows.batch.catch_up()
    found += rows.verify({0: list(b"zz")})
    found += rows.step() + rows.step() + rows.step()
    drawn = [token for token in found if token.row == 1]
    assert [token.token_id for token in drawn] == [token.token_id for token in expected]
    for token, other in zip(drawn, expected, strict=True):
        assert abs(token.logprob - other.logprob) < TOLERANCE


# ---------------------------------------------------------------- log-probabilities


def test_log_probabilities_are_the_models_own_whatever_is_drawn() -> None:
    """A temperature changes what is drawn, not the log-probability that is told."""
    rows = rows_of()
    prompts = {row: (5, 1, 8, 2 + row) for row in range(3)}
    rows.join(
        prompts, 6, sampling={1: Sampling(temperature=3.0, seed=1), 2: Sampling(repetition_penalty=2.0)}
    )
    found = rows.finish()
    for row, tokens in found.items():
        ids = [token.token_id for token in tokens]
        expected = oracle_logprobs(rows.model, [*prompts[row], *ids])[len(prompts[row]) - 1 : -1]
        assert (ids == expected.argmax(axis=-1).tolist()) == (row == 0)
        for place, token in enumerate(tokens):
            assert abs(token.logprob - expected[place, token.token_id]) < TOLERANCE


class Watched:
    """Stands for the logsumexp of a step and notes which rows of it are used; any other use fails."""

    def __init__(self, values: mx.array, used: list[int]) -> None:
        self._values = values
        self._used = used

    def __getitem__(self, rows: mx.array) -> mx.array:
        self._used += np.array(rows).tolist()
        return self._values[rows]


class Passes:
    """`logprob` with a note of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[mx.Dtype, tuple[int, ...], tuple[int, ...]]] = []
        self.normalised: list[int] = []
        monkeypatch.setattr(steps, "logprob", self)

    def __call__(self, logits: mx.array, targets: mx.array) -> Any:
        self.calls.append((logits.dtype, tuple(logits.shape), tuple(targets.shape)))
        found: LogProb = logprob(logits, targets)
        watched: Any = Watched(found.logsumexp, self.normalised)
        return found._replace(logsumexp=watched)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_greedy_step_is_one_pass_over_the_logits_as_they_are(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither cast nor normalised: the row's logsumexp is not even looked at."""
    model = tiny_model("llama", VOCAB)
    model.set_dtype(dtype)
    passes = Passes(monkeypatch)
    rows = rows_of(model=model)
    rows.join({row: (1, 2, 3 + row) for row in range(3)}, 4)
    found = rows.finish()
    assert passes.calls == [(dtype, (3, VOCAB), (3, 0))] * 4
    assert passes.normalised == []
    assert all(len(tokens) == 4 for tokens in found.values())


def test_only_the_rows_that_sample_are_drawn_and_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []

    def counted(logits: mx.array, samplers: Sequence[Sampler]) -> mx.array:
        drawn.append((*logits.shape, len(samplers)))
        return draw(logits, samplers)

    monkeypatch.setattr(steps, "draw", counted)
    passes = Passes(monkeypatch)
    rows = rows_of()
    rows.join({row: (1, 2, 3 + row) for row in range(3)}, 2, sampling={1: Sampling(temperature=2.0, seed=3)})
    found = rows.finish()
    assert passes.calls == [(mx.float32, (3, VOCAB), (3, 0))] * 2
    (place,) = set(passes.normalised)
    assert passes.normalised == [place] * 2
    assert drawn == [(1, VOCAB, 1)] * 2
    assert all(len(tokens) == 2 for tokens in found.values())


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_distribution_has_no_finite_logprob_and_its_neighbour_has(
    value: float, samples: bool
) -> None:
    class Damaged(ScriptedModel):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits = super().__call__(inputs, cache)
            is_damaged = (inputs == ord("b"))[..., None] & (mx.arange(logits.shape[-1]) == 5)
            return mx.where(is_damaged, value, logits)

    sampling = {0: Sampling(temperature=1.0)} if samples else None
    rows = Rows(Damaged("abcd", "xyzu"))
    rows.join({0: script(0), 1: script(1)}, sampling=sampling)
    for _ in range(3):
        tokens = rows.step()
    assert [math.isfinite(token.logprob) for token in tokens] == [True, True]
    finite = {token.row: math.isfinite(token.logprob) for token in rows.step()}
    assert finite == {0: False, 1: True}


@pytest.mark.parametrize("run_tokens", [0, 10**6])
@pytest.mark.parametrize("kind", BATCHED)
def test_a_row_without_numbers_spoils_none_beside_it_nor_the_one_that_takes_its_place(
    kind: str, run_tokens: int
) -> None:
    """What it has read is no number either, and stays in its place until somebody else is there."""
    model = tiny_model(kind, VOCAB, seed=3, **KINDS[kind])
    embedding = next(
        module for path, module in model.named_modules() if "embed" in path and "weight" in module
    )
    embedding.weight[41] = mx.nan
    stem = tuple(range(50, 66))
    prompts: dict[int, Sequence[int]] = {0: (*stem, 9, 10), 1: (*stem, 9, 41), 2: (*stem, 11, 12, 13)}
    rows = rows_of(kind, model)
    rows.join({0: prompts[0], 1: prompts[1]}, 12, run_tokens=run_tokens)
    found: dict[int, list[Token]] = {0: [], 1: [], 2: []}
    for at in range(14):
        for token in rows.step():
            found[token.row].append(token)
        if at == 3:
            rows.batch.leave({1})
            rows.join({2: prompts[2]}, 8, run_tokens=run_tokens)
    assert not any(math.isfinite(token.logprob) for token in found.pop(1))
    assert [len(tokens) for tokens in found.values()] == [12, 8]
    embedding.weight[41] = 0.0
    assert_greedy(model, prompts, found)


# ---------------------------------------------------------------- memory


def test_a_long_stem_is_stored_once_for_64_rows() -> None:
    """1 MiB of rows beside 64 KiB of the stem, or 5 MiB of rows."""
    stem = np.random.default_rng(0).integers(8, VOCAB, 256).tolist()
    prompts = {row: (*stem, 8 + row, 9, 10) for row in range(64)}
    texts, sizes, peaks = [], [], []
    for run_tokens in (0, 10**9):
        rows = rows_of()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        rows.join(prompts, 4, run_tokens=run_tokens)
        rows.step()
        sizes.append(rows.batch.nbytes)
        texts.append({row: [token.token_id for token in tokens] for row, tokens in rows.finish().items()})
        mx.synchronize()
        peaks.append(mx.get_peak_memory() - before)
    assert texts[0] == texts[1]
    token_bytes = allowed()[0].cache.token_bytes
    assert sizes == [(64 * 64 + 256) * token_bytes, 64 * 320 * token_bytes]
    assert peaks[0] < peaks[1] / 2


def test_buffers_are_given_back_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CLEAR_STEPS", 3)
    rows = Rows(ScriptedModel("a"))
    rows.join({0: script(0)}, 7)
    calls: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    rows.finish()
    assert len(calls) == 2


# ---------------------------------------------------------------- one row


def plain_batch(model: Any, ids: Sequence[int], max_tokens: int = 50) -> RowBatch:
    batch = RowBatch(model, PlainCaches())
    read = ReadRows(np.array([len(ids) - 1], np.int32), None, read_alone(model, ids[:-1]))
    batch.join([RowStart(0, ids[-1], max_tokens)], read)
    return batch


def test_a_row_alone_is_computed_in_mlx_lms_own_caches() -> None:
    from mlx_lm.models.cache import KVCache

    kinds: list[type] = []

    class Looking(ScriptedModel):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            kinds.append(type(cache[0]))
            return super().__call__(inputs, cache)

    model = Looking("abc")
    batch = plain_batch(model, script(0), 2)
    with pytest.raises(ValueError, match="one at a time"):
        batch.join([RowStart(1, 5, 2)], ReadRows(np.ones(1, np.int32), None, []))
    tokens = [token for _ in range(3) for token in batch.step()]
    assert written(tokens) == {0: "ab"}
    assert len(batch) == 0
    assert set(kinds) == {KVCache}
    assert model.calls == [(1, 1)] * 3


@pytest.mark.parametrize("kind", ["gemma2", "mamba"])
def test_a_row_alone_is_the_oracles(kind: str) -> None:
    model = random_model(kind)
    batch = plain_batch(model, prompt := (9, 50, 51, 52), 10)
    tokens = [token for _ in range(11) for token in batch.step()]
    assert_greedy(model, {0: prompt}, {0: tokens})
    assert len(tokens) == 10
