from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlx_eval import config
from mlx_eval.engine import row_caches, rows
from mlx_eval.engine.row_caches import RowCaches
from mlx_eval.engine.sharing import WAYS, ModelSharing, find_sharing
from mlx_eval.engine.slots import SlotCache, Table
from mlx_eval.engine.together import ALONE, DRAFT_STEPS, PLAIN_STEPS, Decoding, find_decoding
from mlx_eval.models.head import RowHead
from tests.engine.decoders import KINDS, allowed, random_model
from tests.tiny import tiny_model

BOTH = Decoding(together=True, drafts=True)
ROWS = Decoding(together=True, drafts=False)


def sharing_of(model: nn.Module) -> ModelSharing:
    return find_sharing(model, RowHead(model, config.LOGITS_BYTES))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", BOTH),
        ("qwen3", BOTH),
        ("gemma3_text", BOTH),
        ("gemma2", ALONE),
        ("mamba", ROWS),
        ("mamba2", ROWS),
        ("recurrent_gemma", ROWS),
    ],
)
def test_what_a_model_allows_is_found(kind: str, expected: Decoding) -> None:
    """A recurrent state cannot forget a draft."""
    assert allowed(kind)[1] == expected


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_precision_is_no_reason_to_decode_alone(dtype: mx.Dtype) -> None:
    model = tiny_model("llama", 64)
    model.set_dtype(dtype)
    assert find_decoding(model, sharing_of(model)) == BOTH


def test_gemma2_without_grouped_heads_is_decoded_together() -> None:
    """With grouped ones its mask is broadcast over the wrong axis, silently for some numbers of rows."""
    model = tiny_model("gemma2", 64, query_pre_attn_scalar=8, num_key_value_heads=4)
    assert find_decoding(model, sharing_of(model)).together


def test_a_model_that_refuses_batches_is_decoded_alone() -> None:
    model = tiny_model("llama", 64)
    sharing = sharing_of(model)

    class Lone(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            if inputs.shape[0] > 1:
                raise ValueError("one row, please")
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Lone
    assert find_decoding(model, sharing) == ALONE


def test_a_model_whose_rows_cannot_go_on_from_a_prefix_is_not_asked() -> None:
    model = tiny_model("llama", 64)
    sharing = replace(sharing_of(model), way=WAYS[-2])

    class Silent(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("the model was called")

    model.__class__ = Silent
    assert find_decoding(model, sharing) == ALONE


def test_a_model_that_computes_one_token_another_way_than_several_takes_no_drafts() -> None:
    """As those that read what they have read before in one step only."""
    model = tiny_model("llama", 64)
    sharing = sharing_of(model)

    class Single(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            logits = super().__call__(inputs, *arguments, **options)
            is_draft = inputs.shape[0] > 1 and 1 < inputs.shape[1] < 4
            return logits[:, ::-1] if is_draft else logits

    model.__class__ = Single
    assert find_decoding(model, sharing) == ROWS


def test_rows_join_and_leave_while_others_go_on() -> None:
    model = tiny_model("llama", 64)
    sharing = sharing_of(model)
    calls: list[tuple[int, ...]] = []

    class Counted(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, inputs: mx.array, *arguments: Any, **options: Any) -> Any:
            calls.append(tuple(inputs.shape))
            return super().__call__(inputs, *arguments, **options)

    model.__class__ = Counted
    assert find_decoding(model, sharing) == BOTH
    drafts = [(3, 1), (3, 3), (2, 1), (4, 2), (4, 1)]
    assert calls[-len(DRAFT_STEPS) :] == drafts
    at = len(calls) - len(DRAFT_STEPS)
    rows = [2, 3, 3, 4, 3]
    assert len(PLAIN_STEPS) == len(rows)
    plain = [place for place in range(at) if calls[place : place + 5] == [(count, 1) for count in rows]]
    assert len(plain) == 1


Fault = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: type, name: str, change: Callable[..., Any]) -> Fault:
    """A method that is `change(original, self, ...)` while a test runs."""
    original = getattr(owner, name)

    def fault(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            owner, name, lambda self, *arguments, **options: change(original, self, *arguments, **options)
        )

    return fault


def rolled(array: mx.array) -> mx.array:
    return mx.concatenate([array[:, :, 1:], array[:, :, :1]], axis=2)


def all_true(original: Any, self: Table, *arguments: Any) -> Any:
    return np.ones_like(original(self, *arguments))


def one_further(begin: Any, self: Table, count: int) -> None:
    begin(self, count)
    self.offset = self.offset + 1


FAULTS: dict[str, Fault] = {
    "rows that join are written a slot too far": replaced(
        SlotCache,
        "write",
        lambda write, self, places, keys, values: write(self, places, rolled(keys), values),
    ),
    "rows that move are not copied": replaced(SlotCache, "put", lambda put, self, places, copies: None),
    "rows are told to move elsewhere": replaced(
        RowCaches,
        "_order",
        lambda order, self: [*order(self)[::-1]] if self._holes else order(self),
    ),
    "positions are off by one": replaced(Table, "begin_step", one_further),
    "rows are taken to have read more": replaced(
        Table, "advance", lambda advance, self, read: advance(self, read + 1)
    ),
    "masks show everything": replaced(Table, "_seen", all_true),
    "the prefix is not read": replaced(SlotCache, "prefix_of", lambda prefix, self, run: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_what_decoding_does_to_caches_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, _ = allowed()
    FAULTS[name](monkeypatch)
    assert find_decoding(random_model(), sharing) == ALONE


def test_rows_of_states_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, _ = allowed("mamba")
    take = rows.take_rows
    monkeypatch.setattr(row_caches, "take_rows", lambda cache, order: take(cache, order[::-1]))
    assert find_decoding(random_model("mamba"), sharing) == ALONE


def test_a_window_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, _ = allowed("gemma3_text")
    seen = Table._seen
    monkeypatch.setattr(
        Table, "_seen", lambda self, begin, end, kept, window: seen(self, begin, end, kept, None)
    )
    assert find_decoding(random_model("gemma3_text"), sharing) == ALONE


def test_a_model_that_gives_nan_has_other_troubles_than_batches() -> None:
    model = tiny_model("llama", 64)
    sharing = sharing_of(model)
    model.lm_head.weight *= mx.nan
    assert find_decoding(model, sharing).together


def test_a_token_that_never_comes_is_no_reason_to_decode_alone() -> None:
    """A bias of -inf on one token, say."""
    model = tiny_model("llama", 64)
    head = model.lm_head

    class Barred(type(head)):  # type: ignore[misc]  # the class of a loaded layer
        def __call__(self, states: mx.array) -> Any:
            logits = super().__call__(states)
            return mx.where(mx.arange(logits.shape[-1]) == 7, -mx.inf, logits)

    head.__class__ = Barred
    assert find_decoding(model, sharing_of(model)) == BOTH


def test_what_the_model_raises_for_a_single_row_is_raised() -> None:
    model = tiny_model("llama", 64)
    sharing = sharing_of(model)

    class Broken(type(model)):  # type: ignore[misc]  # the class of a loaded model
        def __call__(self, *arguments: Any, **options: Any) -> mx.array:
            raise ValueError("no weights")

    model.__class__ = Broken
    with pytest.raises(ValueError, match="no weights"):
        find_decoding(model, sharing)


@pytest.mark.parametrize("kind", ["mixtral"])
def test_a_mixture_of_experts_is_decoded_together(kind: str) -> None:
    model = tiny_model(kind, 64, num_local_experts=4, num_experts_per_tok=2, **KINDS.get(kind, {}))
    assert find_decoding(model, sharing_of(model)) == BOTH
