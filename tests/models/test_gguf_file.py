"""The GGUF container: what it holds comes out, and a damaged one is named in one line."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from mlx_eval.errors import ModelError
from mlx_eval.models.gguf_file import read_file

from .gguf_files import write_file

KEYS = {
    "a.text": "grüße",
    "a.flag": True,
    "a.whole": 7,
    "a.real": 1e-5,
    "a.words": ["one", "", "drei ▁"],
    "a.numbers": [1, -2, 3],
    "a.reals": [0.5, -1.5],
}
TENSORS = {"matrix": np.arange(12, dtype=np.float32).reshape(3, 4), "row": np.ones(5, np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_file(tmp_path / "file.gguf", "llama", KEYS, TENSORS)


def test_metadata_and_tensors_come_out(path: Path) -> None:
    file = read_file(path)
    assert file.architecture == "llama"
    assert (file.text("a.text"), file.flag("a.flag"), file.integer("a.whole")) == ("grüße", True, 7)
    assert file.number("a.real") == 1e-5  # not the 9.99999974e-06 that the float32 is
    assert file.array("a.words") == ["one", "", "drei ▁"]
    assert file.array("a.numbers").tolist() == [1, -2, 3]
    assert file.array("a.reals").tolist() == [0.5, -1.5]
    matrix = file.tensors["matrix"]
    assert (matrix.shape, matrix.type_name) == ((3, 4), "F32")
    np.testing.assert_array_equal(matrix.data.view(np.float32).reshape(3, 4), TENSORS["matrix"])
    np.testing.assert_array_equal(file.tensors["row"].data.view(np.float32), 1)


def test_the_header_is_what_the_gguf_package_reads(path: Path) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    file = read_file(path)
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        mine = file.metadata[name]
        theirs = field.contents()
        assert np.allclose(mine, theirs) if not isinstance(mine, str | list) else mine == theirs, name
    assert {each.name: each.data.tobytes() for each in reader.tensors} == {
        name: tensor.data.tobytes() for name, tensor in file.tensors.items()
    }


def test_asking_for_another_type_or_nothing_names_the_key(path: Path) -> None:
    file = read_file(path)
    with pytest.raises(ModelError, match=r"no key a\.other"):
        file.text("a.other")
    with pytest.raises(ModelError, match=r"a\.text holds 'grüße', expected a number"):
        file.number("a.text")
    with pytest.raises(ModelError, match=r"a\.real holds 1e-05, expected one whole number"):
        file.integer("a.real")
    with pytest.raises(ModelError, match=r"a\.flag holds True, expected one whole number"):
        file.integer("a.flag")
    with pytest.raises(ModelError, match=r"a\.whole holds 7, expected true or false"):
        file.flag("a.whole")
    with pytest.raises(ModelError, match=r"a\.text holds .* expected an array"):
        file.array("a.text")
    assert file.integer("a.other", 3) == 3


def test_every_cut_is_found(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    end = len(whole) - 12  # the writer pads the last tensor, of 20 bytes, to 32: that may be missing
    for size in range(1, end):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError) as error:
            read_file(cut)
        assert "\n" not in str(error.value)
        assert str(cut) in str(error.value)
    cut.write_bytes(whole[:end])
    read_file(cut)


def test_a_cut_in_the_tensors_says_how_much_is_missing(path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"cut short: tensor row ends at byte [\d,]+, the file has [\d,]+"):
        read_file(cut)


def test_damaged_headers_give_no_other_error(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    refused = 0
    for _ in range(500):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(whole) - 100)] = rng.choice([0, 1, 7, 8, 9, 127, 128, 255])
        damaged.write_bytes(changed)
        try:
            read_file(damaged)
        except ModelError:
            refused += 1
    assert refused > 50


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelError, match=r"cannot read .*x\.gguf: No such file"):
        read_file(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"x\.gguf is empty"):
        read_file(path)
    path.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_file(path)
    with pytest.raises(ModelError, match="cannot read"):
        read_file(tmp_path)


def test_other_versions_are_named(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:8] = (1).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="of version 1; little-endian versions 2 and 3 are read"):
        read_file(path)
    data[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(data)
    with pytest.raises(ModelError, match="written for big-endian machines"):
        read_file(path)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "part.gguf", "llama", {"split.count": 3}, TENSORS)
    with pytest.raises(ModelError, match="one part of a GGUF model in 3 files; join them"):
        read_file(path)


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("matrix", TENSORS["matrix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = read_file(path).tensors["matrix"].data
    np.testing.assert_array_equal(data.view(np.float32).reshape(3, 4), TENSORS["matrix"])


def test_an_unknown_element_type_is_named_by_number(tmp_path: Path) -> None:
    path = write_file(tmp_path / "new.gguf", "llama", {}, {"t": np.ones(4, np.float32)})
    data = path.read_bytes()
    described = b"\x01" + bytes(7) + b"t" + (1).to_bytes(4, "little") + (4).to_bytes(8, "little")
    at = data.index(described) + len(described)
    path.write_bytes(data[:at] + (4).to_bytes(4, "little") + data[at + 4 :])  # 4 was Q4_2, withdrawn
    with pytest.raises(ModelError, match="tensor t has the element type number 4"):
        read_file(path)
