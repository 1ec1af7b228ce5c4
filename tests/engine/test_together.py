from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

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
