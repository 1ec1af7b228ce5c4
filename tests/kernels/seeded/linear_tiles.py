"""Bugs of `linear_tiles.metal`, seen through `linear_logprob`."""

from __future__ import annotations

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.linear_logprob import EIGHT_BITS, FOUR_BITS, MANY, NARROW, TINY, sparse_trial

FILE = "linear_tiles.metal"


def bug(name: str, kind: str, edit: tuple[str, str], caught_by: Detector, trial: Trial = MANY) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


BUGS = (
    # tiles
    bug("rows behind the last", "tail", ("row < end && ", ""), Detector.DEVICE_BOUNDS),
    bug(
        "columns behind the last",
        "tail",
        (" && size_t(place) < rows.width", ""),
        Detector.DEVICE_BOUNDS,
        NARROW,
    ),
    bug(
        "tiles filled by half",
        "tail",
        ("i < ROWS * DEPTH", "i < ROWS * DEPTH / 2"),
        Detector.UNINITIALISED,
    ),
    bug("columns of tiles", "stride", ("i % DEPTH + j]", "j]"), Detector.WRITE_AFTER_WRITE),
    bug(
        "a stride of the columns",
        "stride",
        ("(i / DEPTH) * STRIDE", "(i / DEPTH) * DEPTH"),
        Detector.UNINITIALISED,
    ),
    bug(
        "weight offsets of 32 bits",
        "32 bits",
        ("row * width + column;", "size_t(uint(row) * uint(width) + uint(column));"),
        Detector.VALUE,
        sparse_trial(),
    ),
    # packed weights
    bug(
        "a mask of one bit less",
        "packing",
        ("(1u << BITS)", "(1u << (BITS - 1))"),
        Detector.VALUE,
        FOUR_BITS,
    ),
    bug(
        "numbers from the top of a word",
        "packing",
        ("uint(BITS * j)", "uint(32 - BITS - BITS * j)"),
        Detector.VALUE,
        EIGHT_BITS,
    ),
    bug(
        "the first word for all eight",
        "packing",
        ("size_t(i / IN_WORD)]", "0]"),
        Detector.VALUE,
        EIGHT_BITS,
    ),
    bug(
        "the scale of the first group",
        "packing",
        (" + column / size_t(GROUP)", ""),
        Detector.VALUE,
        FOUR_BITS,
    ),
    bug("a bias left out", "packing", (" + bias;", ";"), Detector.VALUE, FOUR_BITS),
    bug(
        "words read for each number",
        "bytes",
        (
            "      for (int j = 0; j < IN_WORD; j++) {\n        values",
            "      for (int j = 0; j < IN_WORD; j++) {\n"
            "        values[i + j] = float(words[place + size_t(i / IN_WORD)]);\n        values",
        ),
        Detector.BYTES,
        FOUR_BITS,
    ),
    bug(
        "scales that name the device's memory",
        "address space",
        ("  Scales scales;  //", "  const device float* scales;  //"),
        Detector.STATIC,
        TINY,
    ),
    bug(
        "the index of the lane itself with another's logits",
        "ties",
        ("simd_shuffle_xor(own.index, distance)", "simd_shuffle_xor(own.index, ushort(0))"),
        Detector.VALUE,
    ),
)
