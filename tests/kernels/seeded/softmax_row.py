"""Bugs of `softmax_row.metal`, seen through `logprob`; of `merged`, through `linear_logprob`."""

from __future__ import annotations

import math
from dataclasses import replace

import mlx.core as mx

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.linear_logprob import MANY
from tests.kernels.seeded.trials import logprob_trial, logprob_trial_of
from tests.kernels.test_edges import check_ties

FILE = "softmax_row.metal"
ROWS = logprob_trial(16, 1030, 3)
INF_AND_NAN = logprob_trial_of(mx.array([[0.0, math.inf, math.nan]]), mx.array([[0, 1, 2]]))
NEGATIVE_NAN = logprob_trial_of(mx.array([[0.0, math.inf, -math.nan]]), mx.array([[0, 1, 2]]))
FEW = logprob_trial(16, 5, 3)
TIES = Trial(check_ties, "mlx_eval_linear_logprob")


def bug(
    name: str, kind: str, edit: tuple[str, str], trial: Trial = ROWS, caught_by: Detector = Detector.VALUE
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


BUGS = (
    bug("the last of equal values in a thread", "ties", ("key > row.key", "key >= row.key")),
    bug(
        "the last of equal values among lanes",
        "ties",
        (
            "metal::simd_min(row.key == all.key ? row.index : NO_INDEX)",
            "metal::simd_max(row.key == all.key ? row.index : 0u)",
        ),
    ),
    bug("-0 below 0", "signed zeros", ("(bits & 0x7fffffffu) == 0u", "bits == 0u")),
    bug("0 above -0", "signed zeros", ("return 0x80000000u", "return 0x80000001u + bits / 0x80000000u")),
    bug("negative values upside down", "order", ("0u ? ~bits", "0u ? bits")),
    bug("NaN not told", "NaN", ("return NAN_KEY", "return 0u"), INF_AND_NAN),
    bug(
        "NaN of negative sign not told",
        "NaN",
        ("(bits & 0x7fffffffu) > 0x7f800000u", "bits > 0x7f800000u && bits < 0x80000000u"),
        NEGATIVE_NAN,
    ),
    bug("-inf at the start", "infinity", ("row.top = LOWEST", "row.top = -INFINITY"), FEW),
    bug("a lowest number that is not low", "infinity", ("-3.402823466e+38f", "-100.0f")),
    bug("no rescaling in a thread", "rescale", ("    row.sum *= metal::exp(row.top - top);\n", "")),
    bug("no rescaling among lanes", "rescale", ("row.sum * metal::exp(row.top - all.top)", "row.sum")),
    bug(
        "largest values that begin with anything",
        "uninitialised variable",
        ("  row.top = LOWEST;\n", ""),
        replace(FEW, fill="zero"),
    ),
    bug("sums that begin with anything", "uninitialised variable", ("  row.sum = 0.0f;\n", "")),
    bug(
        "sums of chunks that begin with anything",
        "uninitialised variable",
        ("float sum = 0.0f;", "float sum;"),
    ),
    bug(
        "behind the end of a chunk in the sum",
        "tail",
        (
            "      sum += metal::exp(values[i] - top);\n",
            "    }\n    sum += metal::exp(values[i] - top);\n    if (i < count) {\n",
        ),
    ),
    bug("the index of its chunk for a value", "wrong index", ("index + uint(i)", "index")),
    bug(
        "sums over half of the lanes",
        "shuffle",
        (
            "  all.sum = metal::simd_sum(row.sum * metal::exp(row.top - all.top));\n",
            "  all.sum = row.sum * metal::exp(row.top - all.top);\n"
            "  for (ushort distance = 1; distance < 16; distance *= 2) {\n"
            "    all.sum += metal::simd_shuffle_xor(all.sum, distance);\n  }\n",
        ),
    ),
    bug(
        "a state in no address space",
        "address space",
        ("thread SoftmaxRow& row", "SoftmaxRow& row"),
        FEW,
        Detector.STATIC,
    ),
    bug(
        "the library of C++",
        "address space",
        ("metal::simd_max(row.top)", "std::max(row.top, row.top)"),
        FEW,
        Detector.STATIC,
    ),
    bug("the own index of two equal values", "ties", ("a.key > b.key", "a.key >= b.key"), TIES),
    bug(
        "no rescaling of the second state", "rescale", ("b.sum * metal::exp(b.top - row.top)", "b.sum"), MANY
    ),
    bug("the index of the smaller value", "order", ("first ? a.index", "!first ? a.index"), MANY),
)
