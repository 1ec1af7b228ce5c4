"""The index of task files equals lm-eval's own, whatever is in the cache, and parses only what has changed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager, _yaml_loader

from mlx_eval.harness import index as module
from mlx_eval.harness.index import fill, index_folders, own_folder

LONG_AGO = 1_600_000_000

FILES = {
    "base_yaml": "output_type: multiple_choice\nmetadata: {version: 1}\ntask_list: [of the base only]\n",
    "more_yaml": "include: base_yaml\nmetadata: {version: 2}\ndoc_to_text: more\n",
    "one.yaml": "include: base_yaml\ntask: one\ntag: [fruit, tree]\n",
    "two.yaml": "include: [base_yaml, sub/inner_yaml]\ntask: two\ntag: fruit\n",
    "json.yaml": '{"include": "more_yaml", "task": "three", "doc_to_text": "own words"}',
    "sub/inner_yaml": "doc_to_target: inner\nprocess_docs: !function code.inner\n",
    "sub/four.yaml": "include: ../more_yaml\ntask: four\nprocess_docs: !function code.four\n",
    "sub/class.yaml": "task: five\nclass: !function code.Five\n",
    "sub/group.yaml": "group: all_fruit\ntask: [one, two, {task: four, num_fewshot: 2}]\ntag: groups\n",
    "z/one.yaml": "task: one\ndoc_to_text: the second file of that name in a folder does not count\n",
    "z/group.yaml": "group: all_fruit\ntask: [one]\n",
    "odd/date.yaml": "task: dated\nday: 2024-01-01\n",
    "odd/keys.yaml": "task: numbered\nmap: {1: one, 2.5: two, true: three}\n",
    "odd/set.yaml": "task: sets\nmap: !!set {a, b}\n",
    "odd/anchor.yaml": "task: anchors\nfirst: &x {a: [1]}\nsecond: *x\n",
    "odd/text.yaml": "task: texts\nfirst: äöü\nsecond: .nan\nthird: .inf\nfourth: null\n",
    # what lm-eval leaves out
    "__pycache__/hidden.yaml": "task: hidden\n",
    "other.yml": "task: yml\n",
    "bad/plain.yaml": "dataset_path: no task\n",
    "bad/empty.yaml": "",
    "bad/list.yaml": "- 1\n",
    "bad/open.yaml": "task: [unclosed\n",
    "bad/lost.yaml": "include: nowhere\ntask: lost\n",
    "bad/none.yaml": "include:\ntask: none\n",
    "bad/round.yaml": "include: round.yaml\ntask: round\n",
    "bad/twice.yaml": "include: [../base_yaml, ../more_yaml]\ntask: twice\n",
    "bad/unhashable.yaml": "task: {a: 1}\n",
    "bad/classless.yaml": "class: !function code.X\n",
    "bad/self.yaml": "task: selfish\nlist: &x [*x]\n",
    "bad/python.yaml": "task: !!python/object/apply:os.getcwd []\n",
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder, in which every folder's files are kept."""
    monkeypatch.setenv("MLX_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "FEWEST_FILES", 0)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "tasks", FILES)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that lm-eval's loader is given."""
    names: list[str] = []
    load_yaml = _yaml_loader.load_yaml

    def load(path: Any, **options: Any) -> dict[str, Any]:
        names.append(Path(path).name)
        config: dict[str, Any] = load_yaml(path, **options)
        return config

    monkeypatch.setattr(_yaml_loader, "load_yaml", load)
    return names


def write_files(folder: Path, files: dict[str, str], time: int = LONG_AGO) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (time, time))
    return folder


def oracle(*folders: Path) -> dict[str, Any]:
    """lm-eval's own index of the folders."""
    index: dict[str, Any] = TaskManager(include_path=list(folders), include_defaults=False).task_index
    return index


def check_equal(*folders: Path) -> None:
    found, expected = index_folders(folders).entries, oracle(*folders)
    assert list(found) == list(expected)
    for name, entry in expected.items():
        # texts: not-a-number is not equal to itself
        assert repr(found[name]) == repr(entry)


def test_the_index_is_lm_evals_with_and_without_a_cache(folder: Path, cache: Path) -> None:
    expected = oracle(folder)
    assert {"one", "two", "three", "four", "five", "all_fruit", "fruit", "dated", "sets", "anchors"} <= set(
        expected
    )
    assert not {"hidden", "yml", "lost", "round", "twice"} & set(expected)
    for _ in range(3):
        check_equal(folder)
    assert len(list(cache.iterdir())) == 1


def test_a_manager_filled_with_it_answers_as_lm_evals(folder: Path, cache: Path) -> None:
    plain: Any = TaskManager(include_path=str(folder), include_defaults=False)
    manager: Any = TaskManager(include_defaults=False)
    fill(manager, index_folders([folder]).entries)
    for name in ("all_tasks", "all_subtasks", "all_groups", "all_tags"):
        assert getattr(manager, name) == getattr(plain, name)
        assert getattr(manager, name), name
    assert manager.match_tasks(["t*"]) == plain.match_tasks(["t*"])
    assert vars(manager).keys() == vars(plain).keys()


def test_unchanged_files_are_not_parsed_again(folder: Path, cache: Path, parsed: list[str]) -> None:
    index_folders([folder])
    assert len(parsed) == len(set(parsed)) + 2  # each once; two names stand in two folders
    del parsed[:]
    index_folders([folder])
    broken = {"empty.yaml", "list.yaml", "open.yaml", "python.yaml"}
    beyond_json = {"date.yaml", "keys.yaml", "set.yaml", "self.yaml", "text.yaml"}  # text.yaml: not a number
    assert set(parsed) == broken | beyond_json


@pytest.mark.parametrize("name", ["one.yaml", "base_yaml", "sub/inner_yaml", "sub/group.yaml"])
def test_a_changed_file_is_seen_where_it_is_included_too(
    folder: Path, cache: Path, parsed: list[str], name: str
) -> None:
    check_equal(folder)
    text = FILES[name] + "num_fewshot: 7\n"
    write_files(folder, {name: text}, time=LONG_AGO + 1)
    before = index_folders([folder]).entries
    assert parsed.count(Path(name).name) >= 2
    assert any("num_fewshot" in (entry.cfg or {}) for entry in before.values())
    check_equal(folder)


def test_new_and_deleted_files_are_seen(folder: Path, cache: Path) -> None:
    check_equal(folder)
    write_files(folder, {"sub/deeper/six.yaml": "include: ../../base_yaml\ntask: six\n"})
    (folder / "two.yaml").unlink()
    check_equal(folder)
    (folder / "base_yaml").unlink()
    check_equal(folder)
    assert "one" in index_folders([folder]).entries  # that of z/


def test_another_file_of_the_same_size_and_time_is_seen(folder: Path, cache: Path) -> None:
    check_equal(folder)
    text = FILES["one.yaml"].replace("fruit", "plant")
    write_files(folder, {"new": text})
    os.replace(folder / "new", folder / "one.yaml")
    assert "plant" in index_folders([folder]).entries
    check_equal(folder)


def test_a_file_changed_just_now_is_not_trusted(folder: Path, cache: Path) -> None:
    path = folder / "one.yaml"
    path.write_text(FILES["one.yaml"], encoding="utf-8")
    index_folders([folder])
    state = path.stat()
    path.write_text(FILES["one.yaml"].replace("fruit", "plant"), encoding="utf-8")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # a clock that counts in seconds
    assert "plant" in index_folders([folder]).entries


def test_links_are_followed_to_where_their_includes_are(tmp_path: Path, folder: Path, cache: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "linked.yaml").symlink_to(folder / "sub" / "four.yaml")
    (links / "dangling.yaml").symlink_to(tmp_path / "nowhere")
    (tmp_path / "door").symlink_to(folder)
    for _ in range(2):
        check_equal(links, tmp_path / "door")
    assert "four" in index_folders([links]).entries
    (links / "linked.yaml").unlink()
    (links / "linked.yaml").symlink_to(folder / "one.yaml")
    check_equal(links)


def test_a_later_folder_goes_before_and_it_is_said(tmp_path: Path, folder: Path, cache: Path) -> None:
    own = write_files(
        tmp_path / "own",
        {
            "one.yaml": f"include: {folder / 'more_yaml'}\ntask: one\ntag: fruit\n",
            "new.yaml": "task: new\n",
            "tree.yaml": "task: tree\n",  # a tag there
        },
    )
    for _ in range(2):
        check_equal(folder, own)
    files = index_folders([folder, own])
    assert files.overridden == {"one": (own / "one.yaml", folder / "one.yaml")}
    assert index_folders([folder, folder]).overridden == {}
    assert len(list(cache.iterdir())) == 2


def test_files_that_cannot_be_read_are_named(folder: Path, cache: Path) -> None:
    for _ in range(2):
        broken = index_folders([folder]).broken
        assert {path.name for path in broken} == {
            "empty.yaml", "list.yaml", "open.yaml", "python.yaml", "lost.yaml", "none.yaml", "round.yaml",
            "twice.yaml",
        }  # fmt: skip


def test_a_damaged_cache_is_as_good_as_none(folder: Path, cache: Path, parsed: list[str]) -> None:
    check_equal(folder)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-100], whole.replace(b"multiple_choice", b"generate_until!"), b"{}\n{}"):
        kept.write_bytes(damaged)
        del parsed[:]
        check_equal(folder)
        assert "one.yaml" in parsed
        assert kept.read_bytes() == whole  # mended


def test_a_cache_of_another_version_is_not_used(
    folder: Path, cache: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index_folders([folder])
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0")
    del parsed[:]
    index_folders([folder])
    assert "one.yaml" in parsed


def test_the_cache_is_written_when_something_has_changed_only(folder: Path, cache: Path) -> None:
    index_folders([folder])
    (kept,) = cache.iterdir()
    before = kept.stat()
    index_folders([folder])
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (folder / "two.yaml").unlink()
    index_folders([folder])
    assert kept.stat().st_ino != before.st_ino
    assert b"two.yaml" not in kept.read_bytes()


def test_small_folders_are_read_without_a_cache(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEWEST_FILES", 1000)
    check_equal(folder)
    assert not cache.exists()


@pytest.mark.parametrize("seed", range(5))
def test_any_net_of_includes_and_changes_is_read_as_lm_eval_reads_it(
    tmp_path: Path, cache: Path, seed: int
) -> None:
    choose = random.Random(seed)
    folder = tmp_path / "net"
    names = [f"{place}file{number}.yaml" for place in ("", "a/", "a/b/") for number in range(8)]

    def text() -> str:
        includes = [
            os.path.relpath(folder / other, (folder / name).parent)
            for other in choose.sample(names, choose.choice((0, 0, 1, 1, 2)))
        ]
        lines = [f"include: {includes}"] if includes else []
        lines += [f"task: t{choose.randrange(30)}"] if choose.random() < 0.8 else []
        lines += [f"k{choose.randrange(4)}: {choose.randrange(9)}", f"tag: [g{choose.randrange(3)}]"]
        return "\n".join(lines)

    for name in names:
        write_files(folder, {name: text()})
    for turn in range(6):
        check_equal(folder)
        name = choose.choice(names)
        write_files(folder, {name: text()}, time=LONG_AGO + turn + 1)


@pytest.mark.slow
def test_all_of_lm_evals_task_files_are_indexed_as_it_does(
    cache: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("MLX_EVAL_CACHE", str(cache))
    expected = TaskManager().task_index
    for _ in range(2):
        found = index_folders([own_folder()]).entries
        assert list(found) == list(expected)
        assert found == expected
    assert len(list(cache.iterdir())) == 1
