from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.harness.wrapping import check_ids
from mlx_eval.models.loaded import LoadedModel
from tests.tiny import bpe_tokenizer, loaded, tiny_model

SIZE = 20


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """A model that has fewer rows than its tokenizer has ids."""
    own = loaded(tiny_model(), bpe_tokenizer())
    object.__setattr__(own, "config", {**own.config, "vocab_size": SIZE})
    return own


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "ids": lambda ids: ids,
    "an iterator": iter,
    "sequences": lambda ids: [(1, 2), tuple(ids)],
    "arrays": lambda ids: [np.array([3], dtype=np.int32), np.array(ids, dtype=np.int32)],
    "an empty array too": lambda ids: [np.array([], dtype=np.int32), np.array(ids, dtype=np.int32)],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_highest_id_of_all_is_compared_with_the_embedding(small: LoadedModel, form: str) -> None:
    check_ids(FORMS[form]([0, SIZE - 1, 5]), small)
    with pytest.raises(ModelError, match=f"gives id {SIZE + 1} .* has {SIZE} rows in its embedding"):
        check_ids(FORMS[form]([0, SIZE, SIZE + 1, 5]), small)


def test_no_ids_are_fine(small: LoadedModel) -> None:
    def none() -> Iterator[int]:
        yield from ()

    check_ids(none(), small)


def test_a_model_that_does_not_say_its_size_is_not_asked() -> None:
    own = loaded(tiny_model(), bpe_tokenizer())
    object.__setattr__(own, "config", {})
    check_ids([10**6], own)
