"""Bugs of `attention_tiles.metal`."""

from __future__ import annotations

import numpy as np

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, NEAR, OWN, PREFIX, attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_tiles.metal"
HIDDEN = attention_trial(Sizes(3, 2, 3, 4, 3, 37, 8, 8), (np.arange(37) == 36)[None, None], part=OWN)


def bug(name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = FAR) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


EDGE = attention_trial(Sizes(5, 2, 3, 4, 6, 3, 8, 16), part=PREFIX)
"""One block of keys, most of which is behind the last; values wider than keys."""
VALUE = "      value = float(source[size_t(first + row) * size_t(COLUMNS) + size_t(column)]);\n"
STORE = "    tile[row * WIDTH + column] = value;\n"
TOGETHER = "(row * size_t(num_heads) + size_t(head)) * size_t(row_queries) + size_t(query % row_queries)"

BUGS = (
    bug(
        "queries of all rows in the order of their heads",
        "heads",
        (TOGETHER, "size_t(head) * size_t(row_queries) + size_t(query)"),
        Detector.UNWRITTEN,
    ),
    bug(
        "the first head of each row",
        "heads",
        (
            " + size_t(head)) * size_t(row_queries) + size_t(query % row_queries)",
            ") * size_t(row_queries) + size_t(query % row_queries)",
        ),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "rows and queries the wrong way round",
        "heads",
        ("size_t(query / row_queries)", "size_t(query % row_queries)"),
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "heads that overlap",
        "heads",
        ("return size_t(head) * size_t(row_queries)", "return size_t(head) * size_t(row_queries - 1)"),
        Detector.WRITE_AFTER_WRITE,
        NEAR,
    ),
    bug(
        "keys behind the last", "bounds", ("first + row < end", "first + row <= end"), Detector.DEVICE_BOUNDS
    ),
    bug(
        "the edge of a tile left as it is",
        "uninitialised memory",
        (VALUE + "    }\n" + STORE, VALUE + STORE + "    }\n"),
        Detector.UNINITIALISED,
        EDGE,
    ),
    bug(
        "an edge of anything",
        "uninitialised variable",
        ("float value = 0.0f", "float value"),
        Detector.STATIC,
        EDGE,
    ),
    bug(
        "threads that load every number",
        "two writers",
        ("i = thread_id", "i = 0"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "a loop of half the step", "stride", ("i += THREADS", "i += THREADS / 2"), Detector.WRITE_AFTER_WRITE
    ),
    bug(
        "rows of a tile without the gap",
        "stride",
        ("row * WIDTH + column", "row * COLUMNS + column"),
        Detector.UNINITIALISED,
    ),
    bug(
        "the first keys again",
        "wrong index",
        ("size_t(first + row) * size_t", "size_t(row) * size_t"),
        Detector.VALUE,
    ),
    bug(
        "a tile in no address space",
        "address space",
        ("threadgroup float* tile", "float* tile"),
        Detector.STATIC,
    ),
    bug(
        "a constant in no address space",
        "address space",
        ("constant constexpr float", "constexpr float"),
        Detector.STATIC,
    ),
    bug(
        "a lowest number that is not low",
        "infinity",
        ("-3.402823466e+38f", "-1.0e3f"),
        Detector.VALUE,
        attention_trial(Sizes(3, 2, 1, 4, 70, 3, 8, 8), part=PREFIX, key=-1000.0),
    ),
    bug("-inf for the lowest number", "infinity", ("-3.402823466e+38f", "-INFINITY"), Detector.VALUE, HIDDEN),
)
