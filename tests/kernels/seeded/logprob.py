"""Bugs of `logprob.metal` and of the host that launches it."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import (
    large_logprob_trial,
    logprob_trial,
    logprob_trial_of,
    sparse_logprob_trial,
)

FILE = "logprob.metal"
BARRIER = "  threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
GUARD = "  if (lane == 0) {\n"
ROWS = logprob_trial(16, 1030, 3)
"""More than one turn of the loop, and a last one of two numbers."""
FEW = logprob_trial(16, 5, 3)
MANY_TARGETS = logprob_trial(2, 40, 300)
"""More than threads."""
HALF = logprob_trial(16, 1030, 3, mx.bfloat16)
INF_AND_NAN = logprob_trial_of(mx.array([[0.0, math.inf, math.nan, 1.0, -1.0] * 2]), mx.array([[0, 1, 2]]))
LARGE = large_logprob_trial()
FIVE = logprob_trial(1, 5, 1)
"""Numbers few enough for constant memory."""


def bug(name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = ROWS) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


BUGS = (
    # barriers
    bug("no barrier", "barrier", (BARRIER, ""), Detector.UNINITIALISED),
    bug(
        "a barrier that orders no memory",
        "barrier",
        ("mem_threadgroup", "mem_none"),
        Detector.READ_AFTER_WRITE,
    ),
    bug(
        "a barrier of SIMD groups instead of the group",
        "barrier",
        ("threadgroup_barrier", "simdgroup_barrier"),
        Detector.READ_AFTER_WRITE,
    ),
    bug(
        "one more barrier that only some threads reach",
        "divergence",
        (GUARD, GUARD + "  " + BARRIER),
        Detector.BARRIER_DIVERGENCE,
    ),
    bug(
        "a return of threads without logits before the barrier",
        "divergence",
        (
            "  SoftmaxRow state =",
            "  if (int(thread_id) * CHUNK >= size) {\n    return;\n  }\n  SoftmaxRow state =",
        ),
        Detector.DEADLOCK,
        FEW,
    ),
    bug(
        "a loop that never ends",
        "divergence",
        ("begin += THREADS * CHUNK", "begin += 0"),
        Detector.TIMEOUT,
        replace(FEW, timeout_seconds=0.3),
    ),
    # threadgroup memory
    bug(
        "32 SIMD groups merged of eight",
        "bounds",
        ("if (lane < SIMDS)", "if (lane < 32)"),
        Detector.UNDEFINED,
    ),
    bug(
        "twice as many SIMD groups as there are",
        "uninitialised memory",
        ("THREADS / 32", "THREADS / 16"),
        Detector.UNINITIALISED,
    ),
    bug(
        "a SIMD group that does not leave its state",
        "uninitialised memory",
        (GUARD, "  if (lane == 0 && simd != 3) {\n"),
        Detector.UNINITIALISED,
    ),
    bug(
        "sums of all SIMD groups in one place",
        "wrong index",
        ("sums[simd] =", "sums[lane] ="),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "more threadgroup memory than there is",
        "memory",
        ("float tops[SIMDS]", "float tops[SIMDS * 1024]"),
        Detector.MEMORY,
    ),
    # reads of the logits
    bug("a tail of one too many", "tail", ("size - begin)", "size - begin + 1)"), Detector.DEVICE_BOUNDS),
    bug("a tail of one too few", "tail", ("size - begin)", "size - begin - 1)"), Detector.VALUE),
    bug(
        "chunks read to their end",
        "tail",
        ("i < count ? float(values[begin + i]) : 0.0f", "float(values[begin + i])"),
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "a loop that takes steps of one chunk",
        "stride",
        ("begin += THREADS * CHUNK", "begin += CHUNK"),
        Detector.VALUE,
    ),
    bug(
        "indices of chunks for those of logits",
        "wrong index",
        ("uint(begin))", "uint(begin / CHUNK))"),
        Detector.VALUE,
    ),
    bug(
        "row offsets of 32 bits",
        "32 bits",
        ("size_t(row) * size_t(size)", "row * uint(size)"),
        Detector.VALUE,
        sparse_logprob_trial(),
    ),
    bug(
        "logits read twice",
        "bytes",
        (
            "  state = merged_over_lanes(state);\n  if",
            "  for (int i = int(thread_id); i < size; i += THREADS) {\n"
            "    state.top = metal::max(state.top, float(values[i]) - 1.0e6f);\n  }\n"
            "  state = merged_over_lanes(state);\n  if",
        ),
        Detector.BYTES,
    ),
    bug(
        "a pointer that names the device's memory",
        "address space",
        ("auto values", "const device T* values"),
        Detector.STATIC,
        FIVE,
    ),
    bug("a double", "address space", ("float log_sum", "double log_sum"), Detector.STATIC, FIVE),
    # targets
    bug(
        "the target behind the last token taken",
        "targets",
        ("target < size", "target <= size"),
        Detector.DEVICE_BOUNDS,
    ),
    bug("negative targets taken", "targets", ("target >= 0 && ", ""), Detector.DEVICE_BOUNDS),
    bug("too large targets taken", "targets", (" && target < size", ""), Detector.WILD),
    bug("one target too many", "targets", ("k < num_targets", "k <= num_targets"), Detector.DEVICE_BOUNDS),
    bug(
        "targets scored by every SIMD group",
        "two writers",
        ("k = int(thread_id)", "k = int(lane)"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "targets beyond the threads not scored",
        "unwritten",
        ("k < num_targets; k +=", "k < metal::min(num_targets, THREADS); k +="),
        Detector.UNWRITTEN,
        MANY_TARGETS,
    ),
    # the outputs
    bug(
        "results left by every SIMD group",
        "two writers",
        ("if (thread_id == 0)", "if (lane == 0)"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "no result for rows with NaN",
        "unwritten",
        ("if (thread_id == 0)", "if (thread_id == 0 && !has_nan)"),
        Detector.UNWRITTEN,
    ),
    bug(
        "NaN told by the largest value",
        "NaN",
        ("state.key == NAN_KEY", "metal::isnan(state.top)"),
        Detector.VALUE,
        INF_AND_NAN,
    ),
    bug(
        "NaN not told to targets",
        "NaN",
        ("!has_nan && target >= 0", "target >= 0"),
        Detector.VALUE,
        INF_AND_NAN,
    ),
    bug(
        "inf - inf",
        "infinity",
        ("infinite ? 0.0f : metal::log(state.sum)", "metal::log(state.sum)"),
        Detector.VALUE,
    ),
    bug(
        "log-probabilities rounded to the type of the logits",
        "half type",
        (
            "(float(values[target]) - state.top) - log_sum :",
            "float(T((float(values[target]) - state.top) - log_sum)) :",
        ),
        Detector.VALUE,
        HALF,
    ),
    bug(
        "the logsumexp taken from large logits",
        "digits",
        (
            "(float(values[target]) - state.top) - log_sum :",
            "float(values[target]) - (state.top + log_sum) :",
        ),
        Detector.VALUE,
        LARGE,
    ),
    # the host
    Bug(
        "a grid of one row too few",
        "host",
        FILE,
        (),
        ROWS,
        Detector.UNWRITTEN,
        lambda dispatch: replace(dispatch, grid=(dispatch.grid[0] - 256, 1, 1)),
    ),
    Bug(
        "a grid that counts groups",
        "host",
        FILE,
        (),
        ROWS,
        Detector.UNINITIALISED,
        lambda dispatch: replace(dispatch, grid=(dispatch.grid[0] // 256, 1, 1)),
    ),
    Bug(
        "groups of half as many threads as the kernel takes",
        "host",
        FILE,
        (),
        ROWS,
        Detector.UNINITIALISED,
        lambda dispatch: replace(dispatch, threadgroup=(128, 1, 1)),
    ),
    Bug(
        "a kernel compiled for half as many threads as a group has",
        "host",
        FILE,
        (),
        ROWS,
        Detector.UNDEFINED,
        lambda dispatch: replace(dispatch, template=(dispatch.template[0], ("THREADS", 128))),
    ),
)
