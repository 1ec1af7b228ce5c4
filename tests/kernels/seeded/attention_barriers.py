"""Bugs of `attention_part.metal` in its barriers and in who reaches them."""

from __future__ import annotations

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, NEAR, OWN, WIDE, attention_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_part.metal"
BARRIER = "threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"


def bug(
    name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = FAR, *, times: int = 1
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit, times),), trial, caught_by)


def without_barrier(name: str, before: str, after: str, caught_by: Detector, trial: Trial = FAR) -> Bug:
    """The barrier between these two texts."""
    return bug(name, "barrier", (before + BARRIER + after, before + "{}\n" + after), caught_by, trial)


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
)
