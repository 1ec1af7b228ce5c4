"""Bugs of `attention_merge.metal`."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_merge.metal"
SINKS = (-120.0, 0.5, 2.0, 40.0, 1.0, -1.0)
SPLIT = attention_trial(
    Sizes(3, 2, 3, 5, 600, 7, 8, 16),
    most_read={"near_mixture": 4 * 3 * 6 * 5 * 16, "far_mixture": 2 * 4 * 3 * 6 * 5 * 16},
)
"""Two parts of the prefix, and the own keys."""
SUNK = attention_trial(Sizes(3, 2, 3, 5, 600, 7, 8, 16), sinks=SINKS)
TOP = "    top = metal::max(top, far_tops[size_t(part) * num_queries + query]);\n"
FAR_ABOVE = attention_trial(Sizes(3, 2, 3, 5, 600, 7, 8, 16), size=1e4)
HALF = attention_trial(Sizes(3, 2, 3, 5, 600, 7, 8, 16), dtype=mx.float16)


def bug(
    name: str, kind: str, edit: tuple[str, str], trial: Trial = SPLIT, caught_by: Detector = Detector.VALUE
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


BUGS = (
    bug("the own keys weighted by 1", "weights", ("metal::exp(near_tops[query] - top)", "1.0f")),
    bug("the prefix weighted by 1", "weights", ("metal::exp(far_tops[place] - top)", "1.0f")),
    bug("the first part of the prefix only", "parts", ("num_far = far_tops_shape[0]", "num_far = 1")),
    bug(
        "the first part again and again",
        "parts",
        ("const size_t place = size_t(part) * num_queries + query", "const size_t place = query"),
    ),
    bug(
        "one part too many",
        "parts",
        ("num_far = far_tops_shape[0]", "num_far = far_tops_shape[0] + 1"),
        SPLIT,
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "the own keys left out of the sum",
        "parts",
        ("float sum = near_weight * near_sums[query]", "float sum = 0.0f"),
    ),
    bug("the sums of weights 1", "weights", ("weight * far_sums[place]", "far_sums[place]")),
    bug(
        "no largest score of the prefix",
        "infinity",
        ("top = metal::max(top, far_tops[size_t(part) * num_queries + query])", "top = top"),
        FAR_ABOVE,
    ),
    bug(
        "mixtures of parts as far apart as their sums",
        "stride",
        ("num_queries * size_t(E) + number", "num_queries + number"),
    ),
    bug("groups left out of the number of heads", "heads", (" * size_t(near_tops_shape[3])", ""), SUNK),
    bug(
        "queries as wide as another one",
        "wrong index",
        ("number / size_t(E)", "number / size_t(E - 1)"),
        SPLIT,
        Detector.DEVICE_BOUNDS,
    ),
    bug("sinks that are not counted", "sinks", ("    sum += metal::exp(sink - top);\n", ""), SUNK),
    bug("sinks without the shift", "sinks", ("metal::exp(sink - top)", "metal::exp(sink)"), SUNK),
    bug(
        "sinks in the mixture",
        "sinks",
        (
            "    sum += metal::exp(sink - top);\n",
            "    sum += metal::exp(sink - top);\n    value += metal::exp(sink - top);\n",
        ),
        SUNK,
    ),
    bug(
        "the smaller of a score and a sink",
        "sinks",
        ("top = metal::max(top, sink)", "top = metal::min(top, sink)"),
        SUNK,
    ),
    bug("sinks by token", "sinks", ("query / length % num_heads", "query % num_heads"), SUNK),
    bug(
        "sinks of the first heads for all rows",
        "sinks",
        ("query / length % num_heads", "query / length"),
        SUNK,
        Detector.DEVICE_BOUNDS,
    ),
    bug("a sink where there is none", "sinks", ("  if (SINKS) {\n    sum", "  {\n    sum")),
    bug("a quotient of half types", "half type", ("T(value / sum)", "T(value) / T(sum)"), HALF),
    bug(
        "weights of half types",
        "half type",
        (
            "const float weight = metal::exp(far_tops[place] - top)",
            "const float weight = float(T(metal::exp(far_tops[place] - top)))",
        ),
        HALF,
    ),
    bug(
        "a number less than there are",
        "unwritten",
        ("  mixed[number] =", "  if (number > 0) mixed[number] ="),
        SPLIT,
        Detector.UNWRITTEN,
    ),
    bug(
        "numbers in each other's place",
        "two writers",
        ("mixed[number] =", "mixed[number / 2] ="),
        SPLIT,
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "the prefix's mixtures read twice",
        "bytes",
        (
            TOP,
            TOP
            + "    top = metal::max(top, far_mixture[size_t(part) * num_queries * size_t(E) + number] - 1e30f);\n",
        ),
        SPLIT,
        Detector.BYTES,
    ),
    Bug(
        "a grid that counts groups",
        "host",
        FILE,
        (),
        SPLIT,
        Detector.UNWRITTEN,
        lambda dispatch: replace(dispatch, grid=(-(-dispatch.grid[0] // 256), 1, 1)),
    ),
    Bug(
        "a grid of whole groups",
        "host",
        FILE,
        (),
        SPLIT,
        Detector.DEVICE_BOUNDS,
        lambda dispatch: replace(dispatch, grid=(-(-dispatch.grid[0] // 256) * 256, 1, 1)),
    ),
    Bug(
        "sinks that the kernel is not told of",
        "host",
        FILE,
        (),
        SUNK,
        Detector.VALUE,
        lambda dispatch: replace(
            dispatch, template=tuple({**dict(dispatch.template), "SINKS": False}.items())
        ),
    ),
)
