"""MLX's own Metal kernels run without a finding and agree with MLX's CPU results."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.buffers import as_numpy
from tests.msl.build import why_not
from tests.msl.shipped import Argument, Shipped, run_shipped
from tests.msl.signature import metal_type

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

FLOATS = [mx.float32, mx.float16, mx.bfloat16]
# A result is rounded to its type: half a unit in the last place of 24, 11 or 8 bits, and sums of some thousand
# float32 terms in another order lose three digits.
ROUNDING = {mx.float32: 2e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
NOTHING = np.zeros(64, np.uint8)
"""In place of buffers that a kernel does not touch with these function constants."""


def given(**arrays: mx.array | np.ndarray) -> list[Argument]:
    return [Argument(name, as_numpy(a) if isinstance(a, mx.array) else a) for name, a in arrays.items()]


def written(shape: tuple[int, ...], dtype: mx.Dtype) -> Argument:
    return Argument("result", as_numpy(mx.zeros(shape, dtype=dtype)), is_output=True)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def unused(*names: str) -> list[Argument]:
    return given(**dict.fromkeys(names, NOTHING))


def normal(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def as_float(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.bfloat16:
        return np.array(mx.array(values).view(mx.bfloat16).astype(mx.float32))
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("num_rows", "size", "group"), [(3, 1000, 1024), (2, 5001, 1024), (4, 33, 32)])
def test_cross_entropy(num_rows: int, size: int, group: int, dtype: mx.Dtype) -> None:
    logits = normal((num_rows, size), size, dtype) * 5
    targets = mx.random.randint(0, size, (num_rows,), key=mx.random.key(1))
    kernel = Shipped("cross_entropy.h", f"cross_entropy<{metal_type(dtype)}>")
    result = written((num_rows,), mx.float32)
    arguments = [*given(logits=logits, targets=targets), result, *given(axis=int32(size))]
    (losses,), report = run_shipped(kernel, arguments, (num_rows * group, 1, 1), (group, 1, 1))
    wide = logits.astype(mx.float32)
    expected = mx.logsumexp(wide, -1) - mx.take_along_axis(wide, targets[:, None], -1)[:, 0]
    assert report.errors == ()
    np.testing.assert_allclose(losses, np.array(expected), rtol=ROUNDING[mx.float32])


@pytest.mark.parametrize(
    ("function", "size", "group"), [("logsumexp", 1000, 256), ("logsumexp_looped", 5001, 1024)]
)
def test_logsumexp(function: str, size: int, group: int) -> None:
    values = normal((3, size), size) * 5
    arguments = [*given(values=values), written((3,), mx.float32), *given(axis=int32(size))]
    kernel = Shipped("logsumexp.h", f"{function}<float>")
    (sums,), report = run_shipped(kernel, arguments, (3 * group, 1, 1), (group, 1, 1))
    assert report.errors == ()
    np.testing.assert_allclose(sums, np.array(mx.logsumexp(values, -1)), rtol=ROUNDING[mx.float32])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("function", "size", "group"), [("softmax_single_row", 1000, 256), ("softmax_looped", 5001, 1024)]
)
def test_softmax(function: str, size: int, group: int, dtype: mx.Dtype) -> None:
    values = normal((3, size), size, dtype) * 5
    arguments = [*given(values=values), written((3, size), dtype), *given(axis=int32(size))]
    kernel = Shipped("softmax.h", f"{function}<{metal_type(dtype)}, float>")
    (shares,), report = run_shipped(kernel, arguments, (3 * group, 1, 1), (group, 1, 1))
    expected = np.array(mx.softmax(values.astype(mx.float32), -1))
    assert report.errors == ()
    # half types have subnormals of about 1e-7 here, which lose digits
    np.testing.assert_allclose(as_float(shares, dtype), expected, rtol=ROUNDING[dtype], atol=1e-7)


@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize(
    ("num_keys", "head_size", "dtype"), [(77, 64, mx.float32), (33, 128, mx.float16), (77, 64, mx.bfloat16)]
)
def test_attention_of_one_query(num_keys: int, head_size: int, mask: str, dtype: mx.Dtype) -> None:
    num_queries = 2 if mask == "causal" else 1
    q = normal((1, 4, num_queries, head_size), 0, dtype)
    k, v = (normal((1, 2, num_keys, head_size), seed, dtype) for seed in (1, 2))
    kept = mx.random.uniform(shape=(1, 4, num_queries, num_keys), key=mx.random.key(num_keys)) > 0.3
    added = mx.where(kept, 0.5, -1e4).astype(dtype)
    scale = head_size**-0.5
    arguments = [
        *given(q=q, k=k, v=v),
        written((1, 4, num_queries, head_size), dtype),
        *given(gqa_factor=int32(2), num_keys=int32(num_keys)),
        *given(k_head=np.array([num_keys * head_size], np.uint64), k_row=np.array([head_size], np.uint64)),
        *given(v_head=np.array([num_keys * head_size], np.uint64), v_row=np.array([head_size], np.uint64)),
        *given(scale=np.array([scale], np.float32)),
        *given(
            bool_mask=kept if mask == "bool" else NOTHING, float_mask=added if mask == "float" else NOTHING
        ),
        *given(mask_key=int32(1), mask_query=int32(num_keys), mask_head=int32(num_queries * num_keys)),
        *unused("sinks"),
        *given(num_heads=int32(4)),
    ]
    constants = {
        "has_mask": mask in ("bool", "float"),
        "query_transposed": False,
        "do_causal": mask == "causal",
        "bool_mask": mask == "bool",
        "float_mask": mask == "float",
        "has_sinks": False,
        "blocks": 1,
    }
    kernel = Shipped("sdpa_vector.h", f"sdpa_vector<{metal_type(dtype)}, {head_size}>", constants)
    (result,), report = run_shipped(kernel, arguments, (4 * 1024, num_queries, 1), (1024, 1, 1))
    masks = {"none": None, "bool": kept, "float": added.astype(mx.float32), "causal": "causal"}
    wide = [array.astype(mx.float32) for array in (q, k, v)]
    expected = np.array(mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=masks[mask]))
    assert report.errors == ()
    # values of either sign cancel: the error is that of the summands, of about 1
    np.testing.assert_allclose(as_float(result, dtype), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_matrix_times_few_vectors() -> None:
    num_rows, size, num_vectors = 37, 100, 3
    matrix, vectors = normal((num_rows, size), 0), normal((num_vectors, size), 1)
    arguments = [
        *given(matrix=matrix, vectors=vectors),
        *unused("bias"),
        written((num_vectors, num_rows), mx.float32),
        *given(size=int32(size), num_rows=int32(num_rows), num_vectors=int32(num_vectors)),
        *given(matrix_row=int32(size), vector_row=int32(size)),
        *unused("alpha", "beta"),
        *given(
            ndim=int32(1),
            batch=int32(1),
            vector_batch=np.zeros(1, np.int64),
            matrix_batch=np.zeros(1, np.int64),
        ),
        *unused("bias_batch", "bias_row", "bias_item"),
    ]
    # 32 lanes a row, four rows a group
    kernel = Shipped("gemv.h", "gemv_wide<float, 4, 32>")
    (products,), report = run_shipped(kernel, arguments, (32, 4 * -(-num_rows // 4), 1), (32, 4, 1))
    assert report.errors == ()
    np.testing.assert_allclose(products, np.array(vectors @ matrix.T), rtol=1e-4, atol=ROUNDING[mx.float32])


# Rows in eights: in a tail, two simdgroups of MLX's kernel write equal values to the same rows, a race by our rule.
@pytest.mark.parametrize(
    ("function", "bits", "group_size", "size", "num_rows"),
    [("affine_qmv_fast", 4, 64, 512, 24), ("affine_qmv_fast", 8, 32, 512, 16), ("affine_qmv", 4, 32, 96, 16)],
)
def test_quantized_matrix_times_vector(
    function: str, bits: int, group_size: int, size: int, num_rows: int
) -> None:
    vectors = normal((3, size), 1)
    words, scales, biases = mx.quantize(normal((num_rows, size), 0), group_size=group_size, bits=bits)
    arguments = [
        *given(words=words, scales=scales, biases=biases, vectors=vectors),
        written((3, num_rows), mx.float32),
        *given(size=int32(size), num_rows=int32(num_rows), ndim=int32(0)),
        *unused("shape", "strides"),
        *given(words_ndim=int32(0)),
        *unused("words_shape", "words_strides", "scales_strides", "biases_strides"),
    ]
    needs = ("steel/gemm/gemm.h", "quantized_utils.h")
    kernel = Shipped("quantized.h", f"{function}<float, {group_size}, {bits}, false>", needs=needs)
    (products,), report = run_shipped(kernel, arguments, (3 * 32, 2 * -(-num_rows // 8), 1), (32, 2, 1))
    expected = mx.quantized_matmul(vectors, words, scales, biases, group_size=group_size, bits=bits)
    assert report.errors == ()
    # sums of up to 512 products of about 1
    np.testing.assert_allclose(products, np.array(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("m", "n", "k", "transposed", "dtype"),
    [
        (64, 64, 32, False, mx.float32),
        (64, 64, 32, True, mx.float16),
        (64, 64, 32, False, mx.bfloat16),
        (70, 50, 40, True, mx.float32),
        (70, 50, 40, False, mx.bfloat16),
    ],
)
def test_matrix_product_by_simdgroup_matrices(
    m: int, n: int, k: int, transposed: bool, dtype: mx.Dtype
) -> None:
    a, b = normal((m, k), 0, dtype), normal((n, k) if transposed else (k, n), 1, dtype)
    tile, depth = 32, 16
    tiles_n, tiles_m = -(-n // tile), -(-m // tile)
    layout = np.dtype(
        [("sizes", np.int32, 8), ("batch_strides", np.int64, 3), ("rest", np.int32, 4)], align=True
    )
    parameters = np.zeros(1, layout)
    parameters["sizes"] = [m, n, k, k, k if transposed else n, n, tiles_n, tiles_m]
    parameters["rest"] = [0, k // depth, 0, 0]
    arguments = [
        *given(a=a, b=b),
        *unused("c"),
        written((m, n), dtype),
        *given(parameters=parameters.view(np.uint8)),
        *unused("source_parameters", "batch_shape", "batch_strides"),
    ]
    constants = {"align_M": m % tile == 0, "align_N": n % tile == 0, "align_K": k % depth == 0}
    call = f"gemm<{metal_type(dtype)}, {tile}, {tile}, {depth}, 2, 2, false, {str(transposed).lower()}>"
    kernel = Shipped("steel/gemm/kernels/steel_gemm_fused.h", call, constants, ("steel/gemm/gemm.h",))
    (product,), report = run_shipped(kernel, arguments, (tiles_n * 32, tiles_m * 2, 2), (32, 2, 2))
    right = b.astype(mx.float32).T if transposed else b.astype(mx.float32)
    assert report.errors == ()
    # sums of up to 40 products of about 1
    np.testing.assert_allclose(
        as_float(product, dtype), np.array(a.astype(mx.float32) @ right), rtol=ROUNDING[dtype], atol=1e-4
    )
