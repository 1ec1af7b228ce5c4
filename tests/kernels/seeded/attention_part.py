"""Bugs of `attention_part.metal` in what threads share: barriers, tiles, bounds and places of the outputs."""

from __future__ import annotations

from dataclasses import replace

from mlx_eval_kernels.launch import Dispatch

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, NEAR, OWN, PREFIX, SPLIT, attention_trial, sparse_attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_part.metal"
BARRIER = "threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
LOAD_KEYS = (
    "    load_tile<BLOCK, D, WIDTH, THREADS>"
    "(tile, keys + size_t(head) * size_t(num_keys) * size_t(D), start, end, thread_id);\n"
)
WIDE = attention_trial(Sizes(9, 1, 1, 4, 40, 3, 136, 136), part=PREFIX, size=0.25)
"""Two blocks of 32 queries, whose tiles have 16 rows."""


def bug(
    name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = FAR, *, times: int = 1
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit, times),), trial, caught_by)


def without_barrier(name: str, before: str, after: str, caught_by: Detector, trial: Trial = FAR) -> Bug:
    """The barrier between these two texts."""
    return bug(name, "barrier", (before + BARRIER + after, before + "{}\n" + after), caught_by, trial)


def with_template(dispatch: Dispatch, **changed: int) -> Dispatch:
    return replace(dispatch, template=tuple({**dict(dispatch.template), **changed}.items()))


BUGS = (
    # barriers, in the order of the kernel
    without_barrier(
        "a second block of queries over the first",
        "for (int base = 0; base < QUERIES; base += BLOCK) {\n    ",
        "    for (int i = thread_id; i < BLOCK * D",
        Detector.WRITE_AFTER_READ,
        WIDE,
    ),
    without_barrier(
        "queries read before they are there",
        "i % D] = value;\n    }\n    ",
        "    const int own",
        Detector.UNINITIALISED,
    ),
    without_barrier(
        "keys over queries and values that are still read",
        "start += BLOCK) {\n    ",
        "    load_tile<BLOCK, D",
        Detector.WRITE_AFTER_READ,
    ),
    without_barrier(
        "keys read before they are there",
        "size_t(D), start, end, thread_id);\n    ",
        "    threadgroup float* own_scores",
        Detector.READ_AFTER_WRITE,
    ),
    without_barrier(
        "values over keys that are still read",
        "      metal::simdgroup_store(product, own_scores + j, SCORES);\n    }\n    ",
        "    load_tile<BLOCK, E",
        Detector.WRITE_AFTER_READ,
    ),
    without_barrier(
        "values read before they are there",
        "simd_any(factor != 1.0f);\n    ",
        "\n    if (grew)",
        Detector.READ_AFTER_WRITE,
    ),
    without_barrier(
        "results over values that are still read",
        "for (int base = 0; base < QUERIES; base += BLOCK) {\n    ",
        "    const int own",
        Detector.WRITE_AFTER_READ,
    ),
    without_barrier(
        "results read before they are there",
        "8 * e, WIDTH);\n      }\n    }\n    ",
        "    for (int i = thread_id; i < BLOCK * E",
        Detector.READ_AFTER_WRITE,
    ),
    bug(
        "barriers that order the device's memory",
        "barrier",
        ("mem_threadgroup", "mem_device"),
        Detector.READ_AFTER_WRITE,
        times=8,
    ),
    bug(
        "barriers of SIMD groups instead of the group",
        "barrier",
        ("threadgroup_barrier", "simdgroup_barrier"),
        Detector.READ_AFTER_WRITE,
        times=8,
    ),
    bug(
        "one more barrier for SIMD groups whose scores grew",
        "divergence",
        ("    if (grew) {\n", "    if (grew) {\n" + BARRIER),
        Detector.BARRIER_DIVERGENCE,
    ),
    bug(
        "as many blocks of keys as each SIMD group needs",
        "divergence",
        ("metal::min(first + QUERIES, num_queries) - 1", "metal::min(first + 8 * simd + 8, num_queries) - 1"),
        Detector.BARRIER_DIVERGENCE,
        attention_trial(Sizes(1, 1, 1, 32, 3, 40, 8, 8), "causal", part=OWN),
    ),
    bug(
        "a return of lanes without a query",
        "divergence",
        ("  const int token =", "  if (number >= num_queries) {\n    return;\n  }\n  const int token ="),
        Detector.DEADLOCK,
        NEAR,
    ),
    bug(
        "matrices rescaled by some lanes",
        "divergence",
        ("metal::simd_any(factor != 1.0f)", "factor != 1.0f"),
        Detector.SIMD_DIVERGENCE,
    ),
    # bounds
    bug(
        "a tile as wide as keys, not as the wider",
        "bounds",
        ("tile[BLOCK * WIDTH]", "tile[BLOCK * D]"),
        Detector.UNDEFINED,
    ),
    bug(
        "a stride of the narrower of keys and values",
        "stride",
        ("(D > E ? D : E)", "(D < E ? D : E)"),
        Detector.THREADGROUP_BOUNDS,
    ),
    bug(
        "no room for the gap behind scores",
        "bounds",
        ("scores[QUERIES * SCORES]", "scores[QUERIES * BLOCK]"),
        Detector.THREADGROUP_BOUNDS,
    ),
    bug(
        "factors of one SIMD group",
        "bounds",
        ("factors[SIMDS * 64]", "factors[64]"),
        Detector.UNDEFINED,
    ),
    bug(
        "blocks of queries as far apart as blocks of keys",
        "stride",
        ("threadgroup_position_in_grid.y) * QUERIES", "threadgroup_position_in_grid.y) * BLOCK"),
        Detector.WRITE_AFTER_WRITE,
        WIDE,
    ),
    bug(
        "queries behind the last",
        "bounds",
        (" && first + row < num_queries", ""),
        Detector.DEVICE_BOUNDS,
        NEAR,
    ),
    bug(
        "a block of queries of which one is missing",
        "tail",
        ("first + row < num_queries", "first + row < num_queries - 1"),
        Detector.VALUE,
    ),
    bug(
        "results of queries behind the last",
        "bounds",
        (" && first + from < num_queries", ""),
        Detector.WRITE_AFTER_WRITE,
        NEAR,
    ),
    bug(
        "sums of queries behind the last",
        "two writers",
        ("if (quarter == 0 && number < num_queries)", "if (quarter == 0)"),
        Detector.WRITE_AFTER_WRITE,
        NEAR,
    ),
    bug(
        "sums written by four lanes",
        "two writers",
        ("if (quarter == 0 && number", "if (number"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "no sums",
        "unwritten",
        ("    sums[place] = sum;\n", ""),
        Detector.UNWRITTEN,
    ),
    bug(
        "results as wide as keys",
        "unwritten",
        ("i < BLOCK * E; i += THREADS", "i < BLOCK * D; i += THREADS"),
        Detector.UNWRITTEN,
    ),
    bug(
        "matrices stored as often as keys have columns",
        "tail",
        (
            "for (int e = 0; e < E / 8; e++) {\n        metal::simdgroup_store",
            "for (int e = 0; e < D / 8; e++) {\n        metal::simdgroup_store",
        ),
        Detector.VALUE,
    ),
    bug(
        "all splits in one place",
        "two writers",
        ("size_t part = size_t(split)", "size_t part = size_t(0)"),
        Detector.WRITE_AFTER_WRITE,
        SPLIT,
    ),
    bug(
        "results of another stride than the tile's",
        "stride",
        ("= tile[(i / E) * WIDTH + i % E]", "= tile[i]"),
        Detector.UNINITIALISED,
    ),
    bug(
        "keys of the first head for all",
        "heads",
        ("keys + size_t(head)", "keys + size_t(0)"),
        Detector.VALUE,
    ),
    bug(
        "keys of its row's first head",
        "heads",
        ("keys + size_t(head)", "keys + size_t(head / num_heads * num_heads)"),
        Detector.VALUE,
        NEAR,
    ),
    bug(
        "heads of values as far apart as those of keys",
        "stride",
        (
            "values + size_t(head) * size_t(num_keys) * size_t(E)",
            "values + size_t(head) * size_t(num_keys) * size_t(D)",
        ),
        Detector.VALUE,
    ),
    bug(
        "values read as wide as keys",
        "stride",
        ("load_tile<BLOCK, E,", "load_tile<BLOCK, D,"),
        Detector.DEVICE_BOUNDS,
        NEAR,
    ),
    bug(
        "the last split not cut to the keys",
        "bounds",
        ("metal::min(num_keys, begin + per_split)", "begin + per_split"),
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "keys beyond 32 bits",
        "32 bits",
        (
            "keys + size_t(head) * size_t(num_keys) * size_t(D)",
            "keys + uint(head) * uint(num_keys) * uint(D)",
        ),
        Detector.VALUE,
        sparse_attention_trial(512, 128, 8),
    ),
    bug(
        "values beyond 32 bits",
        "32 bits",
        (
            "values + size_t(head) * size_t(num_keys) * size_t(E)",
            "values + uint(head) * uint(num_keys) * uint(E)",
        ),
        Detector.VALUE,
        sparse_attention_trial(2048, 8, 128),
    ),
    bug(
        "keys read twice",
        "bytes",
        (LOAD_KEYS, LOAD_KEYS + LOAD_KEYS),
        Detector.BYTES,
    ),
    bug(
        "keys above the diagonal",
        "bytes",
        ("    end = metal::min(end, num_keys - (wraps ? 0 : length - 1 - last % length));\n", ""),
        Detector.BYTES,
        attention_trial(
            Sizes(1, 1, 1, 96, 1, 96, 8, 8), "causal", part=OWN, most_read={"keys": 4 * 8 * (32 + 64 + 96)}
        ),
    ),
    bug(
        "a double",
        "address space",
        ("float sum = 0.0f", "double sum = 0.0"),
        Detector.STATIC,
    ),
    # the host
    Bug(
        "a grid of one block of queries too few",
        "host",
        FILE,
        (),
        FAR,
        Detector.UNWRITTEN,
        lambda dispatch: replace(dispatch, grid=(dispatch.grid[0], dispatch.grid[1] - 1, dispatch.grid[2])),
    ),
    Bug(
        "a group of one SIMD group for a kernel of four",
        "host",
        FILE,
        (),
        FAR,
        Detector.UNINITIALISED,
        lambda dispatch: replace(dispatch, threadgroup=(32, 1, 1)),
    ),
    Bug(
        "32 keys at a time of the widest heads",
        "host",
        FILE,
        (),
        WIDE,
        Detector.MEMORY,
        lambda dispatch: with_template(dispatch, BLOCK=64),
    ),
    Bug(
        "the prefix in the order of the rows",
        "host",
        FILE,
        (),
        FAR,
        Detector.UNWRITTEN,
        lambda dispatch: with_template(dispatch, TOGETHER=False),
    ),
)
