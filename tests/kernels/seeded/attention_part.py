"""Bugs of `attention_part.metal` in places and bounds, in what is read, and in how it is launched."""

from __future__ import annotations

from dataclasses import replace

from mlx_eval_kernels.launch import Dispatch

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, NEAR, OWN, SPLIT, WIDE, attention_trial, sparse_attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_part.metal"
LOAD_KEYS = (
    "    load_tile<BLOCK, D, WIDTH, THREADS>"
    "(tile, keys + size_t(head) * size_t(num_keys) * size_t(D), start, end, thread_id);\n"
)
DIAGONAL = attention_trial(
    Sizes(1, 1, 1, 90, 1, 97, 8, 8),
    "causal",
    part=OWN,
    most_read=dict.fromkeys(("keys", "values"), 4 * 8 * (39 + 71 + 97)),
)
"""Blocks of queries that see ever more keys."""


def bug(name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = FAR) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


def with_template(dispatch: Dispatch, **changed: int) -> Dispatch:
    return replace(dispatch, template=tuple({**dict(dispatch.template), **changed}.items()))


BUGS = (
    # bounds
    bug(
        "a tile as wide as keys, not as the wider",
        "bounds",
        ("tile[BLOCK * WIDTH]", "tile[BLOCK * D]"),
        Detector.UNDEFINED,
    ),
    bug(
        "no room for the gap behind scores",
        "bounds",
        ("scores[QUERIES * SCORES]", "scores[QUERIES * BLOCK]"),
        Detector.THREADGROUP_BOUNDS,
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
        "sums written by four lanes",
        "two writers",
        ("if (quarter == 0 && number", "if (number"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "results as wide as keys",
        "unwritten",
        ("i < BLOCK * E; i += THREADS", "i < BLOCK * D; i += THREADS"),
        Detector.UNWRITTEN,
    ),
    bug(
        "all splits in one place",
        "two writers",
        ("size_t part = size_t(split)", "size_t part = size_t(0)"),
        Detector.WRITE_AFTER_WRITE,
        SPLIT,
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
        DIAGONAL,
    ),
    bug(
        "keys above the diagonal of blocks that seem to go on to another head",
        "bytes",
        ("(last - first) >= length", "last >= length"),
        Detector.BYTES,
        DIAGONAL,
    ),
    bug(
        "values read to the end of a block",
        "bytes",
        ("size_t(E), start, end, thread_id", "size_t(E), start, num_keys, thread_id"),
        Detector.BYTES,
        DIAGONAL,
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
