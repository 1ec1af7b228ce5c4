"""Bugs of `attention_part.metal` in which keys a query sees: splits, causal order, masks and padding."""

from __future__ import annotations

import numpy as np

from tests.kernels.seeded.bugs import Bug, Detector, Edit, Trial
from tests.kernels.seeded.trials import FAR, OWN, SPLIT, attention_trial, share_trial
from tests.kernels.test_prefix_attention import Sizes

FILE = "attention_part.metal"
DIAGONAL = attention_trial(Sizes(1, 1, 1, 40, 3, 40, 8, 8), "causal", part=OWN)
"""Two blocks of queries of one head."""
GROUPED = attention_trial(Sizes(1, 1, 3, 70, 3, 100, 8, 8), "causal", part=OWN)
"""Seven blocks of queries of three heads, two of which go on to the next head."""
WIDE = attention_trial(Sizes(1, 1, 1, 24, 3, 40, 136, 136), "causal", part=OWN, size=0.25)
"""A block of queries with more than the rows of a tile."""
TURN = attention_trial(Sizes(1, 1, 2, 31, 3, 31, 8, 8), "causal", part=OWN)
"""A block of queries that ends with the first of the next head."""


def masks(rows: int, length: int, own: int) -> np.ndarray:
    """Half of the keys, and for the first query the last key only: its first block of keys is hidden."""
    seen = np.random.default_rng(1).random((rows, 1, length, own)) < 0.5
    seen[..., -1] = True
    seen[:, :, 0, :-1] = False
    return seen


MASK = attention_trial(Sizes(3, 2, 3, 4, 3, 37, 8, 8), masks(3, 4, 37), part=OWN)
SHARED_MASK = attention_trial(Sizes(3, 2, 3, 4, 3, 37, 8, 8), masks(1, 4, 37), part=OWN)


def bug(
    name: str,
    kind: str,
    edit: tuple[str, str],
    trial: Trial = FAR,
    caught_by: Detector = Detector.VALUE,
) -> Bug:
    return Bug(name, kind, FILE, (Edit(*edit),), trial, caught_by)


BUGS = (
    # splits
    bug(
        "splits of the keys rounded down",
        "splits",
        ("(num_keys + num_splits - 1) / num_splits", "num_keys / num_splits"),
        SPLIT,
    ),
    bug("splits that overlap", "splits", ("begin + per_split)", "begin + per_split + 1)"), SPLIT),
    bug("splits with a gap", "splits", ("begin + per_split)", "begin + per_split - 1)"), SPLIT),
    bug(
        "all keys in the first split",
        "splits",
        ("+ BLOCK - 1) / BLOCK * BLOCK", "+ BLOCK - 1) * BLOCK"),
        share_trial(),
        Detector.BYTES,
    ),
    # which keys a query sees
    bug(
        "a query that sees the key behind its own",
        "causal",
        ("num_keys - length + token", "num_keys - length + token + 1"),
        DIAGONAL,
    ),
    bug("a query that does not see its own key", "causal", ("key <= num_keys", "key < num_keys"), DIAGONAL),
    bug(
        "keys that end before the last query's",
        "causal",
        ("length - 1 - last % length", "length - last % length"),
        DIAGONAL,
    ),
    bug(
        "keys that end with the last query of a block, whatever its head",
        "causal",
        ("wraps ? 0 : length", "length"),
        TURN,
    ),
    bug(
        "the head of a query told by a quotient",
        "causal",
        ("first % length + (last", "first / length + (last"),
        GROUPED,
    ),
    bug(
        "as many queries as keys",
        "causal",
        ("metal::min(first + QUERIES, num_queries) - 1", "metal::min(first + QUERIES, num_keys) - 1"),
        GROUPED,
    ),
    bug("the last token told by the number of keys", "causal", ("last % length", "last % num_keys"), GROUPED),
    bug(
        "blocks of queries as long as blocks of keys",
        "causal",
        ("metal::min(first + QUERIES", "metal::min(first + BLOCK"),
        WIDE,
    ),
    bug("a block that turns to the next head unnoticed", "causal", (">= length;", "> length;"), TURN),
    bug("keys behind the last", "padding", ("key < end && number < num_queries", "number < num_queries")),
    bug("the last key left out", "padding", ("key < end && number", "key < end - 1 && number")),
    bug(
        "the mask of the first row for all", "mask", ("mask_shape[0] == 1 ? 0 : head / num_heads", "0"), MASK
    ),
    bug("masks by head", "mask", ("head / num_heads;", "head % num_heads;"), MASK),
    bug(
        "a mask for each row where there is one for all",
        "mask",
        ("mask_shape[0] == 1 ? 0 : head / num_heads", "head / num_heads"),
        SHARED_MASK,
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "masks read behind the last key",
        "mask",
        ("MASK == 2 && seen[i]", "MASK == 2"),
        MASK,
        Detector.DEVICE_BOUNDS,
    ),
    bug(
        "hidden keys in the sum",
        "mask",
        ("seen[i] ? metal::exp(weights[i] - largest) : 0.0f", "metal::exp(weights[i] - largest)"),
        MASK,
    ),
)
