"""Bugs of `attention_part.metal` in what it computes: products, the softmax and its scale."""

from __future__ import annotations

import mlx.core as mx

from tests.kernels.seeded.attention_keys import MASK
from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, PREFIX, attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_part.metal"
HALF = attention_trial(Sizes(3, 2, 3, 4, 70, 3, 8, 16), part=PREFIX, dtype=mx.float16)
LARGE = attention_trial(Sizes(3, 2, 1, 4, 100, 3, 8, 8), part=PREFIX, size=1e2)
BELOW = attention_trial(Sizes(3, 2, 1, 4, 70, 3, 8, 8), part=PREFIX, key=-100.0)
"""All scores are so low that their exponentials are 0."""
GROWING = attention_trial(Sizes(5, 2, 3, 4, 70, 3, 8, 16), part=PREFIX, growing=True)
"""All queries have larger scores in each block."""
NAN = attention_trial(Sizes(3, 2, 3, 9, 70, 9, 8, 8), "causal", part=PREFIX, nan_query=(1, 2, 4))


def bug(
    name: str,
    kind: str,
    edit: tuple[str, str],
    trial: Trial = FAR,
    caught_by: Detector = Detector.VALUE,
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


OWN_QUERIES = (
    "    const int own = 8 * simd - base;\n    if (own >= 0 && own < BLOCK) {\n"
    '      _Pragma("clang loop unroll(full)")\n      for (int d'
)
XOR = "metal::simd_shuffle_xor"

BUGS = (
    # queries and their heads
    bug(
        "rows of keys for heads of keys",
        "heads",
        ("num_heads = queries_shape[1]", "num_heads = queries_shape[2]"),
        FAR,
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "queries of another place than their results",
        "heads",
        ("place_of<TOGETHER>(first + row,", "place_of<false>(first + row,"),
    ),
    bug("no scale", "scale", (" * scale;", ";")),
    bug("the scale twice", "scale", (" * scale;", " * scale * scale;")),
    bug(
        "queries rounded after scaling",
        "half type",
        (
            "float(queries[place * size_t(D) + size_t(i % D)]) * scale",
            "float(T(float(queries[place * size_t(D) + size_t(i % D)]) * scale))",
        ),
        HALF,
    ),
    bug("sums of the type of the queries", "half type", ("float sum = 0.0f", "T sum = T(0.0f)"), HALF),
    bug(
        "weights of the type of the queries",
        "half type",
        ("quarter_scores[i] = weights[i];", "quarter_scores[i] = float(T(weights[i]));"),
        HALF,
    ),
    # matrices
    bug("keys that are not transposed", "matrices", ("WIDTH, 0, true)", "WIDTH, 0, false)")),
    bug(
        "the mixture of the last keys only",
        "matrices",
        (
            "weight, value, mixed[e])",
            "weight, value, metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f))",
        ),
    ),
    bug(
        "scores without the gap",
        "stride",
        ("own_scores + j, SCORES);\n    }", "own_scores + j, BLOCK);\n    }"),
        FAR,
        Detector.UNINITIALISED,
    ),
    bug(
        "scores of the first SIMD group",
        "wrong index",
        ("own_scores = scores + 8 * simd * SCORES", "own_scores = scores"),
        FAR,
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "queries of the first SIMD group for all",
        "wrong index",
        (OWN_QUERIES, OWN_QUERIES.replace("8 * simd - base", "-base")),
    ),
    bug(
        "lanes for SIMD groups",
        "wrong index",
        ("int(simdgroup_index_in_threadgroup)", "int(thread_index_in_simdgroup) / 8"),
        FAR,
        Detector.WRITE_AFTER_WRITE,
    ),
    # the softmax
    bug(
        "the largest of two lanes of four",
        "shuffle",
        (f"    largest = metal::max(largest, {XOR}(largest, ushort(2)));\n", ""),
    ),
    bug("the sum of two lanes of four", "shuffle", (f"    block_sum += {XOR}(block_sum, ushort(2));\n", "")),
    bug(
        "the sum over lanes of two rows",
        "shuffle",
        (f"{XOR}(block_sum, ushort(2))", f"{XOR}(block_sum, ushort(4))"),
    ),
    bug("-inf at the start", "infinity", ("float top = LOWEST", "float top = -INFINITY"), MASK),
    bug("0 at the start", "infinity", ("float top = LOWEST", "float top = 0.0f"), BELOW),
    bug(
        "a largest score of this block alone",
        "rescale",
        ("float largest = top", "float largest = LOWEST"),
        LARGE,
    ),
    bug("the sum not rescaled", "rescale", ("sum * factor + block_sum", "sum + block_sum")),
    bug("the mixture left where all rows grew", "rescale", ("factor != 1.0f", "factor == 1.0f"), GROWING),
    bug("the mixture not rescaled", "rescale", ("if (grew)", "if (false)")),
    bug("the mixture rescaled where all rows grew", "rescale", ("simd_any(factor", "simd_all(factor")),
    bug("factors of the first SIMD group", "rescale", ("factors + simd * 64, 8", "factors, 8")),
    bug(
        "factors of half of the columns",
        "uninitialised memory",
        ("    factors[simd * 64 + row * 8 + quarter * 2 + 1] = factor;\n", ""),
        FAR,
        Detector.UNINITIALISED,
    ),
    Bug(
        "rows rescaled by a diagonal matrix",
        "NaN",
        FILE,
        (
            Edit("quarter * 2] = factor", "quarter * 2] = row == quarter * 2 ? factor : 0.0f"),
            Edit("quarter * 2 + 1] = factor", "quarter * 2 + 1] = row == quarter * 2 + 1 ? factor : 0.0f"),
            Edit("        mixed[e].thread_elements()[1] *= by_row.thread_elements()[1];\n", ""),
            Edit(
                "        mixed[e].thread_elements()[0] *= by_row.thread_elements()[0];\n",
                "        const Matrix zero = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);\n"
                "        metal::simdgroup_multiply_accumulate(mixed[e], by_row, mixed[e], zero);\n",
            ),
        ),
        NAN,
        Detector.VALUE,
    ),
    bug(
        "a sum that begins with anything",
        "uninitialised variable",
        ("float sum = 0.0f", "float sum"),
        FAR,
        Detector.STATIC,
    ),
    bug(
        "a mixture that begins with anything",
        "uninitialised variable",
        ("    mixed[e] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);\n", ""),
    ),
    bug(
        "a product that begins with anything",
        "uninitialised variable",
        ("Matrix product = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f)", "Matrix product"),
    ),
)
