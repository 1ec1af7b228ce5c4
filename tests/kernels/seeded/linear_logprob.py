"""Bugs of `linear_logprob.metal` and of the host that launches it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
from mlx_eval_kernels import DenseHead, Head
from mlx_eval_kernels.launch import Dispatch, Run
from mlx_eval_kernels.linear_logprob import ROWS, TOKENS, by_kernel

from tests.kernels import test_linear_logprob as suite
from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial

FILE = "linear_logprob.metal"
BARRIER = "      threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"
OUTER_BARRIER = "    threadgroup_barrier(metal::mem_flags::mem_threadgroup);\n"


def trial_of(hidden: mx.array, head: Head, count: int = 3) -> Trial:
    """These states and weights, read as often as the suite allows."""
    rows, (size, _) = hidden.shape[0], head.shape
    targets = suite.targets_for(rows, size, count)
    blocks, tiles = -(-rows // ROWS), -(-size // TOKENS)

    def call(run: Run) -> None:
        suite.check(by_kernel(hidden, head, mx.array(targets), run), hidden, head, targets)

    reads = {
        "weight": blocks * head.weight.nbytes,
        "hidden": tiles * hidden.nbytes,
        "targets": 4 * rows * count * (tiles + 2),
    }
    return Trial(call, "mlx_eval_linear_logprob", most_read=reads)


def trial_with(rows: int, width: int, size: int, bits: int = 0) -> Trial:
    head = suite.affine(size, width, 32, bits) if bits else suite.dense(size, width)
    return trial_of(suite.states(rows, width), head)


def sparse_trial() -> Trial:
    """The last token of so many that its weights begin behind 2^32 numbers."""
    size, width = 2**29 + 1, 8
    last = suite.dense(1, width)
    hidden = suite.states(1, width)
    parts = -(-size // 4096)

    def call(run: Run) -> None:
        outputs: list[mx.array] = []

        def keep(dispatch: Dispatch) -> Sequence[mx.array]:
            outputs.extend(run(dispatch))
            return outputs

        weight = mx.broadcast_to(mx.zeros(()), (size, width))
        by_kernel(hidden, DenseHead(weight), mx.array([[size - 1]]), keep)
        logit = (suite.in_float64(hidden) @ suite.in_float64(last.weight).T).item()
        assert abs(outputs[3].item() - logit) < 1e-5  # a float32 sum of eight products of about 1

    return Trial(
        call,
        "mlx_eval_linear_logprob",
        sparse={"weight": {size - 1: last.weight[0]}},
        groups=[(parts - 1, 0, 0)],
    )


MANY = trial_with(40, 96, 200)
"""Two blocks of rows and four tiles of tokens, of which the last is eight wide."""
LONG = trial_with(3, 40, 7000)
"""Parts of two tiles."""
NARROW = trial_with(33, 40, 70)
"""A last tile of columns that is eight wide."""
FOUR_BITS = trial_with(33, 64, 70, bits=4)
EIGHT_BITS = trial_with(33, 64, 70, bits=8)
TINY = trial_with(1, 32, 1, bits=4)
"""Scales so few that they are in constant memory."""
INF_AND_NAN = trial_of(mx.ones((2, 8)), DenseHead(mx.array([[math.inf] * 8, [math.nan] * 8, [1.0] * 8])))
IMPOSSIBLE = trial_of(mx.ones((2, 8)), DenseHead(mx.full((70, 8), -math.inf)))
TIES = trial_of(mx.ones((33, 8)), DenseHead(mx.ones((131, 8))))
"""Every token is the most probable one."""


def bug(name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = MANY) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


FIRST_BARRIER = BARRIER + "      load_tile<ROWS"
SECOND_BARRIER = BARRIER + "      for (int k = 0"
THIRD_BARRIER = OUTER_BARRIER + '    _Pragma("clang loop unroll(full)")'
FOURTH_BARRIER = OUTER_BARRIER + "\n    const int count"

BUGS = (
    # barriers
    bug(
        "no barrier before the next tiles",
        "barrier",
        (FIRST_BARRIER, "      load_tile<ROWS"),
        Detector.WRITE_AFTER_READ,
    ),
    bug(
        "no barrier after the tiles",
        "barrier",
        (SECOND_BARRIER, "      for (int k = 0"),
        Detector.READ_AFTER_WRITE,
    ),
    bug(
        "no barrier before logits take the place of weights",
        "barrier",
        (THIRD_BARRIER, '    _Pragma("clang loop unroll(full)")'),
        Detector.WRITE_AFTER_READ,
    ),
    bug(
        "no barrier before the logits are read",
        "barrier",
        (FOURTH_BARRIER, "\n    const int count"),
        Detector.READ_AFTER_WRITE,
    ),
    bug(
        "a part that its first threads leave early",
        "divergence",
        (SECOND_BARRIER, "      if (row >= num_rows) {\n        break;\n      }\n" + SECOND_BARRIER),
        Detector.BARRIER_DIVERGENCE,
    ),
    # the product
    bug("weights not transposed", "matrix", ("STRIDE, 0, true)", "STRIDE)"), Detector.VALUE),
    bug(
        "the last eight columns of a tile",
        "matrix",
        ("k < DEPTH; k += 8", "k < DEPTH - 8; k += 8"),
        Detector.VALUE,
    ),
    bug("rows of another corner", "matrix", ("simd / 2 * 16", "simd % 2 * 16"), Detector.WRITE_AFTER_WRITE),
    bug(
        "two corners of the same tokens",
        "matrix",
        ("simd % 2 * 32", "simd % 2 * 24"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug("products that begin with ones", "matrix", ("8, 8>(0.0f)", "8, 8>(1.0f)"), Detector.VALUE),
    # the softmax
    bug(
        "tokens behind the last", "tail", ("metal::min(OWN, end - start - own_token)", "OWN"), Detector.VALUE
    ),
    bug("a row of another lane", "wrong index", ("thread_id / 4;", "thread_id % 32;"), Detector.UNWRITTEN),
    bug(
        "a lane's tokens from another place",
        "wrong index",
        ("uint(start + own_token)", "uint(start)"),
        Detector.VALUE,
    ),
    bug(
        "tokens counted from the part's begin",
        "wrong index",
        ("uint(start + own_token)", "uint(start - begin + own_token)"),
        Detector.VALUE,
    ),
    bug("two of four lanes merged", "lanes", ("ushort(2)", "ushort(1)"), Detector.VALUE),
    bug("eight lanes merged", "lanes", ("ushort(2)", "ushort(4)"), Detector.VALUE),
    bug(
        "the last of equal tokens",
        "ties",
        ("merged(state, shuffled(state, ushort(1)))", "shuffled(state, ushort(3))"),
        Detector.VALUE,
        TIES,
    ),
    bug(
        "parts that overlap",
        "parts",
        ("begin + per_split", "begin + per_split + 1"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug("parts with gaps", "parts", ("begin + per_split", "begin + per_split - 1"), Detector.VALUE),
    bug(
        "parts of every second tile",
        "parts",
        ("start += TOKENS", "start += 2 * TOKENS"),
        Detector.UNWRITTEN,
        LONG,
    ),
    bug("NaN not told", "NaN", ("has_nan ? NAN : ", ""), Detector.VALUE, INF_AND_NAN),
    bug(
        "impossible tokens not told", "infinity", ("is_lowest ? -INFINITY : ", ""), Detector.VALUE, IMPOSSIBLE
    ),
    # targets
    bug(
        "a third target that is left out",
        "targets",
        ("chosen[place] = logits", "if (k != 2) chosen[place] = logits"),
        Detector.UNWRITTEN,
    ),
    bug(
        "targets of the tile before",
        "targets",
        ("target >= start && ", ""),
        Detector.THREADGROUP_BOUNDS,
        LONG,
    ),
    bug(
        "targets behind the part",
        "targets",
        ("metal::min(start + TOKENS, end)", "start + TOKENS + 1"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "0 for those that are none",
        "targets",
        ("chosen[place] = NAN", "chosen[place] = 0.0f"),
        Detector.VALUE,
    ),
    bug(
        "NaN from every part",
        "two writers",
        ("row < num_rows && split == 0", "row < num_rows"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "the target behind the last token",
        "targets",
        (" || targets[place] >= size", " || targets[place] > size"),
        Detector.UNWRITTEN,
    ),
    bug(
        "rows behind the last scored",
        "tail",
        ("    if (row < num_rows) {\n", "    {\n"),
        Detector.DEVICE_BOUNDS,
    ),
    # the outputs
    bug(
        "results left by all four lanes",
        "two writers",
        ("thread_id % 4 == 0", "thread_id % 4 < 4"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "results of the first part",
        "wrong index",
        ("size_t(num_splits) + size_t(split)", "size_t(num_splits)"),
        Detector.WRITE_AFTER_WRITE,
    ),
    bug(
        "more threadgroup memory than there is",
        "memory",
        ("hidden_tile[ROWS * STRIDE]", "hidden_tile[ROWS * STRIDE * 8]"),
        Detector.MEMORY,
    ),
    # the host
    Bug(
        "a grid of one block of rows too few",
        "host",
        FILE,
        (),
        MANY,
        Detector.UNWRITTEN,
        lambda dispatch: replace(dispatch, grid=(dispatch.grid[0], 1, 1)),
    ),
    Bug(
        "groups of half as many threads",
        "host",
        FILE,
        (),
        MANY,
        Detector.UNINITIALISED,
        lambda dispatch: replace(dispatch, threadgroup=(64, 1, 1)),
    ),
    Bug(
        "eight bits for four",
        "host",
        FILE,
        (),
        FOUR_BITS,
        Detector.DEVICE_BOUNDS,
        lambda dispatch: replace(dispatch, template=(("BITS", 8), ("GROUP", 32))),
    ),
    Bug(
        "groups of twice as many weights",
        "host",
        FILE,
        (),
        FOUR_BITS,
        Detector.VALUE,
        lambda dispatch: replace(dispatch, template=(("BITS", 4), ("GROUP", 64))),
    ),
)
