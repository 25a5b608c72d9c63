from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from adapipe.data import Corpus, load_corpus
from adapipe.errors import ConfigurationError


def whole(found: Corpus) -> bytes:
    return found.train.tobytes() + found.held_out.tobytes()


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_corpus(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_default_is_the_standard_library_and_always_the_same() -> None:
    first, second = load_corpus(), load_corpus(None)
    assert whole(first) == whole(second)
    assert 5e6 < len(whole(first)) < 25e6
    assert b"class ThreadPoolExecutor" in whole(first)
    assert re.match(r"the standard library of Python 3\.\d+", first.name)


def test_default_leaves_out_tests_and_installed_packages() -> None:
    text = whole(load_corpus())
    assert b"class GrammarTests(unittest.TestCase)" not in text  # test/test_grammar.py
    assert b"class _ConvNd(Module)" not in text  # site-packages/torch
    assert b"class IdleConfParser(ConfigParser)" in text  # idlelib itself is no test


def test_default_held_out_part_is_like_the_training_part() -> None:
    """The hash order spreads the subjects: single bytes are about as frequent in both parts."""
    found = load_corpus()
    train, held_out = (np.bincount(part, minlength=256)[:128] / len(part) for part in (found.train, found.held_out))
    assert np.abs(train - held_out).sum() < 0.15


def test_default_without_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"the corpus is empty .*: give a file or folder with text in it"):
        load_corpus()


def test_a_file_of_any_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3 + b"\xff\xfe\x00\r\n"
    (tmp_path / "binary").write_bytes(content)
    found = load_corpus(tmp_path / "binary")
    assert whole(found) == content
    assert found.name == str(tmp_path / "binary")


@pytest.mark.parametrize("size", [1, 9, 10, 11, 1000, 1009])
def test_the_first_nine_tenths_are_for_training(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    found = load_corpus(tmp_path / "file")
    assert len(found.train) == size * 9 // 10
    assert whole(found) == content
    for part in (found.train, found.held_out):
        assert part.dtype == np.uint8
        assert part.ndim == 1
        assert not part.flags.writeable
    assert not np.shares_memory(found.train, found.held_out)


def test_a_folder_is_all_its_files_joined_by_newlines(tmp_path: Path) -> None:
    texts = {"a.txt": b"aaa", "b": b"bbb\n", "deep/er/c.md": b"ccc", "deep/d.bin": b"\x00\xff"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "nothing.txt").touch()
    content = whole(load_corpus(tmp_path))
    assert len(content) == sum(map(len, texts.values())) + 3
    assert all(text in content for text in texts.values())


def test_a_folder_reads_the_same_wherever_it_lies(tmp_path: Path) -> None:
    """The order comes from the names below the folder: not from the disk, nor from where the folder is."""
    names = [f"{folder}/{name}" for folder in ("x", "y") for name in range(20)]
    for place, order in (("one", names), ("two/three", names[::-1])):
        for name in order:
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).write_text(f"text {name}")
    contents = {
        whole(load_corpus(tmp_path / "one")),
        whole(load_corpus(tmp_path / "two" / "three")),
        whole(load_corpus(tmp_path / "one" / ".." / "one")),
    }
    assert len(contents) == 1
    lines = contents.pop().decode().splitlines()
    assert sorted(lines) == sorted(f"text {name}" for name in names)
    assert lines != sorted(lines)  # mixed, so that the end is not all of y


def test_hidden_files_and_folders_are_skipped(tmp_path: Path) -> None:
    for name in ("seen", ".hidden", ".git/config", "folder/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert whole(load_corpus(tmp_path)) == b"seen"


def test_a_hidden_folder_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "text").write_text("text")
    assert whole(load_corpus(tmp_path / ".cache")) == b"text"


def test_links_are_followed_once_and_loops_are_not(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "folder").mkdir(parents=True)
    outside.mkdir()
    (root / "folder" / "text").write_text("inside")
    (outside / "blob").write_text("linked")
    (tmp_path / "beside").write_text("never asked for")
    (root / "file-link").symlink_to(outside / "blob")
    (root / "folder-link").symlink_to(outside)
    (root / "again").symlink_to(root / "folder" / "text")
    (root / "folder" / "loop").symlink_to(root)
    (root / "up").symlink_to(tmp_path)
    (root / "self").symlink_to(root / "self")
    (root / "broken").symlink_to(tmp_path / "missing")
    assert sorted(whole(load_corpus(root)).split(b"\n")) == [b"inside", b"linked"]


def test_a_link_to_a_corpus_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert whole(load_corpus(tmp_path / "link")) == b"text"


def test_what_is_not_a_regular_file_is_skipped_in_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (tmp_path / "text").write_text("text")
    assert whole(load_corpus(tmp_path)) == b"text"


def test_no_such_path(tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    message = f"no corpus at {path}: check the path (a relative one starts at {Path.cwd()})"
    assert refusal(path) == message


def test_no_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    assert refusal(tmp_path / "file" / "below").startswith("no corpus at ")


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert refusal(path) == f"{path} is neither a file nor a folder: give one of them as the corpus"


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert refusal(path) == f"the corpus is empty ({path}): give a file or folder with text in it"


def test_a_folder_of_empty_files(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    assert refusal(tmp_path).startswith("the corpus is empty")


def test_a_folder_without_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").write_text("text")
    message = f"the folder {tmp_path} has no files (hidden ones do not count): put text files into it"
    assert refusal(tmp_path) == message


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the permission, which root would not be refused."""
    (tmp_path / "good").write_text("text")
    (tmp_path / "secret").write_text("text")
    read_bytes = Path.read_bytes

    def guarded(path: Path) -> bytes:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", guarded)
    message = (
        f"cannot read {tmp_path / 'secret'} for the corpus (Permission denied): "
        "check its permissions, or give another corpus"
    )
    assert refusal(tmp_path) == message
    assert refusal(tmp_path / "secret") == message


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be listed must not silently be left out."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "text").write_text("text")
    scandir = os.scandir

    def guarded(path: str) -> object:
        if os.fspath(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    assert refusal(tmp_path).startswith(f"cannot read {tmp_path / 'secret'} for the corpus (Permission denied)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_permissions_for_real(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "text").write_text("text")
    (tmp_path / "locked").chmod(0)
    try:
        assert "(Permission denied)" in refusal(tmp_path)
        assert "(Permission denied)" in refusal(tmp_path / "locked" / "text")
    finally:
        (tmp_path / "locked").chmod(0o700)


def test_require_accepts_exactly_enough() -> None:
    enough = np.zeros(11, dtype=np.uint8)
    Corpus("text", enough, enough).require(10)


@pytest.mark.parametrize(("train", "held_out", "part"), [(10, 50, "training"), (50, 10, "held-out")])
def test_require_names_the_part_and_the_sizes(train: int, held_out: int, part: str) -> None:
    found = Corpus("text", np.zeros(train, dtype=np.uint8), np.zeros(held_out, dtype=np.uint8))
    with pytest.raises(ConfigurationError) as error:
        found.require(10)
    assert str(error.value) == (
        f"the {part} part of text has 10 bytes, but --sequence-length 10 needs at least 11: "
        "use a larger corpus or shorter sequences"
    )


def test_the_default_is_long_enough_for_any_usual_sequence() -> None:
    load_corpus().require(8192)
