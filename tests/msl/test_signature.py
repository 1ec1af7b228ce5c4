"""The text that the emulation compiles is, byte for byte, what MLX generates."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_eval_kernels.launch import Dispatch, Source

from tests.msl.exported import exported
from tests.msl.signature import ATTRIBUTES, generated

DTYPES = (
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.int32,
    mx.uint32,
    mx.int8,
    mx.uint8,
    mx.int16,
    mx.uint16,
    mx.int64,
    mx.uint64,
    mx.bool_,
)
SHAPES = ((), (1,), (3,), (7,), (8,), (2, 3), (2, 4), (4, 5), (2, 3, 4))


def random_dispatch(seed: int) -> Dispatch:
    """Names that contain each other, every type, sizes around eight, and a body that asks for anything."""
    chosen = random.Random(seed)
    inputs = chosen.sample(["x", "w", "xw", "scales", "biases", "inp", "t"], chosen.randint(1, 5))
    outputs = chosen.sample(["o", "lse", "out", "lp"], chosen.randint(1, 3))
    arrays = [mx.zeros(chosen.choice(SHAPES), dtype=chosen.choice(DTYPES)) for _ in inputs]
    template: list[tuple[str, mx.Dtype | int | bool]] = [
        ("T", chosen.choice(DTYPES)),
        ("N", chosen.choice([0, 1, 32, -1, -7])),
        ("B", chosen.choice([True, False])),
        ("U", chosen.choice(DTYPES)),
    ]
    asked = [f"{name}{suffix};" for name in inputs for suffix in ("_shape", "_strides", "_ndim", "")]
    body = "".join(chosen.sample([*asked, *(f"{name};" for name in ATTRIBUTES)], chosen.randint(1, 12)))
    return Dispatch(
        source=Source(
            name=f"k{seed}",
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            # without any attribute MLX makes a list of parameters that does not close
            body=body + "thread_position_in_grid;",
            header=chosen.choice(["", "// of the header: x_shape\n", "inline int f() { return 1; }"]),
        ),
        inputs=arrays,
        template=chosen.sample(template, chosen.randint(0, 4)),
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
        output_shapes=[(8,)] * len(outputs),
        output_dtypes=[chosen.choice(DTYPES) for _ in outputs],
    )


@pytest.mark.parametrize("seed", range(120))
def test_the_text_is_mlx_s_own(seed: int) -> None:
    dispatch = random_dispatch(seed)
    own, oracle = generated(dispatch), exported(dispatch)
    assert own.function == oracle.function
    assert own.text == oracle.text


def test_the_dispatches_that_are_compared_differ() -> None:
    assert len({generated(random_dispatch(seed)).text for seed in range(120)}) == 120


def test_an_input_of_seven_lies_in_constant_and_one_of_eight_in_device() -> None:
    source = Source("sizes", ("a", "b", "c"), ("out",), "thread_position_in_grid;")
    inputs = [mx.zeros((7,)), mx.zeros((8,)), mx.zeros(())]
    text = generated(Dispatch(source, inputs, [], (8, 1, 1), (8, 1, 1), [(8,)], [mx.float32])).text
    assert "const constant float* a" in text
    assert "const device float* b" in text
    assert "const constant float& c" in text
