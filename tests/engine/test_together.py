from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_eval.engine import together
from mlx_eval.engine.together import decodes_together
from tests.tiny import ScriptedModel, tiny_model

WINDOW = {"query_pre_attn_scalar": 8, "sliding_window": 4, "sliding_window_pattern": 2}


@pytest.mark.parametrize(("kind", "changes"), [("llama", {}), ("qwen3", {}), ("gemma3_text", WINDOW)])
def test_models_that_batch_well_are_decoded_together(kind: str, changes: dict[str, Any]) -> None:
    assert decodes_together(tiny_model(kind, 64, **changes))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_no_reason_to_decode_alone(dtype: mx.Dtype) -> None:
    model = tiny_model("llama", 64)
    model.set_dtype(dtype)
    assert decodes_together(model)


@pytest.mark.parametrize("rows", [2, 3])
def test_gemma2_with_grouped_heads_is_not(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many rows as key heads its mask is broadcast silently, otherwise it raises."""
    monkeypatch.setattr(together, "PROBE_PROMPTS", together.PROBE_PROMPTS[:rows])
    assert not decodes_together(tiny_model("gemma2", 64, query_pre_attn_scalar=8, num_key_value_heads=2))


def test_gemma2_without_grouped_heads_is() -> None:
    assert decodes_together(tiny_model("gemma2", 64, query_pre_attn_scalar=8, num_key_value_heads=4))


def test_a_cache_that_cannot_be_merged() -> None:
    class Unmergeable:
        state: tuple[()] = ()
        offset = 0

    class Model(ScriptedModel):
        def make_cache(self) -> list[Any]:
            return [Unmergeable()]

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(inputs)

    assert not decodes_together(Model("abc"))


@pytest.mark.parametrize("fault", [None, "merge", "extend", "filter"])
def test_whatever_decoding_does_to_caches_is_probed(fault: str | None) -> None:
    """Rows are swapped where the fault is."""

    class Swapping(BatchKVCache):
        @classmethod
        def merge(cls, caches: list[Any]) -> Any:
            return super().merge(caches[::-1] if fault == "merge" else caches)

        def extend(self, other: Any) -> None:
            super().extend(other)
            if fault == "extend":
                self.keys = self.keys[::-1]

        def filter(self, batch_indices: list[int]) -> None:
            super().filter(batch_indices[::-1] if fault == "filter" else batch_indices)

    class Plain(KVCache):
        def merge(self, caches: list[Any]) -> Any:
            return Swapping.merge(caches)

    model = tiny_model("llama", 64)
    model.make_cache = lambda: [Plain() for _ in model.layers]
    assert decodes_together(model) == (fault is None)


def test_rows_step_before_others_join_beside_them_and_after_one_has_left() -> None:
    model = ScriptedModel("abc")
    assert decodes_together(model)
    rows = [rows for rows, length in model.calls if length == 1]
    assert rows[-(together.NUM_STEPS + 2) :] == [1, 1, *[3] * (together.NUM_STEPS - 1), 2]


def test_a_model_that_gives_nan_has_other_troubles_than_batches() -> None:
    model = tiny_model("llama", 64)
    model.lm_head.weight *= mx.nan
    assert decodes_together(model)


def test_a_token_that_never_comes_is_no_reason_to_decode_alone() -> None:
    """A bias of -inf on one token, say."""
    model = tiny_model("llama", 64)
    head = model.lm_head

    class Barred(type(head)):  # type: ignore[misc]  # the class of a loaded layer
        def __call__(self, states: mx.array) -> mx.array:
            logits = super().__call__(states)
            return mx.where(mx.arange(logits.shape[-1]) == 7, -mx.inf, logits)

    head.__class__ = Barred
    assert decodes_together(model)
