"""The text to train on, as bytes: the standard library's source by default, or any file or folder.

    bytes of the corpus   |<──────── train, 90 % ────────>|<─ held out ─>|

The files of a folder come in the order of a hash of their relative path: the same every time, and unrelated
to their subject, so that the held-out end is of the same kind as the rest.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from adapipe.errors import ConfigurationError

_NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, eq=False)
class Corpus:
    """Bytes to train on and bytes to evaluate on, which never overlap: uint8, 1-d, read-only."""

    name: str
    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]

    def require(self, sequence_length: int) -> None:
        """Raise ConfigurationError unless both parts hold one sequence and the byte after it."""
        needed = sequence_length + 1
        for part, found in (("training", len(self.train)), ("held-out", len(self.held_out))):
            if found < needed:
                raise ConfigurationError(
                    f"the {part} part of {self.name} has {found} bytes, but --sequence-length "
                    f"{sequence_length} needs at least {needed}: use a larger corpus or shorter sequences"
                )


def load_corpus(path: Path | None = None) -> Corpus:
    """Read a corpus into memory: the first 90 % of its bytes are for training, the rest is held out.

    `path` is a file, or a folder, of which all files below it are joined by a newline; hidden files and
    folders are skipped, and a file counts once however many links lead to it. None is the source of the
    running Python's standard library without its tests (about 12 MB). Raises ConfigurationError if there is
    nothing to read.
    """
    if path is None:
        return _standard_library()
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"no corpus at {path}: check the path (a relative one starts at {Path.cwd()})"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISREG(mode):
        files = [path]
    elif stat.S_ISDIR(mode):
        files = _in_hash_order(path, _files_below(path, frozenset()))
        if not files:
            raise ConfigurationError(
                f"the folder {path} has no files (hidden ones do not count): put text files into it"
            )
    else:
        raise ConfigurationError(f"{path} is neither a file nor a folder: give one of them as the corpus")
    return _split(str(path), _read(files))


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    files = (file for file in _files_below(root, _NOT_STANDARD_LIBRARY) if file.suffix == ".py")
    name = f"the standard library of Python {sys.version.split()[0]} at {root}"
    return _split(name, _read(_in_hash_order(root, files)))


def _split(name: str, content: bytes) -> Corpus:
    if not content:
        raise ConfigurationError(f"the corpus is empty ({name}): give a file or folder with text in it")
    tokens = np.frombuffer(content, dtype=np.uint8)
    cut = len(tokens) * 9 // 10
    return Corpus(name, tokens[:cut], tokens[cut:])


def _files_below(root: Path, skipped_folders: frozenset[str]) -> Iterator[Path]:
    """The regular files below a folder, through links too, each file and each folder once."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    real_root = Path(os.path.realpath(root))
    # A link to a folder above the root is a loop as well, and would bring in everything beside the root.
    seen = {str(folder) for folder in (real_root, *real_root.parents)}

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        new = real not in seen
        seen.add(real)
        return new

    for folder, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        # Sorted, so that of several links to one file the same one counts on every machine.
        folders[:] = [
            name
            for name in sorted(folders)
            if not name.startswith(".") and name not in skipped_folders and is_new(os.path.join(folder, name))
        ]
        for name in sorted(files):
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path) and is_new(path):
                yield Path(path)


def _in_hash_order(root: Path, files: Iterator[Path]) -> list[Path]:
    def key(file: Path) -> bytes:
        return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest()

    return sorted(files, key=key)


def _read(files: list[Path]) -> bytes:
    contents = []
    for file in files:
        try:
            contents.append(file.read_bytes())
        except OSError as error:
            raise _unreadable(file, error) from error
    return b"\n".join(content for content in contents if content)


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read {path} for the corpus ({error.strerror}): check its permissions, or give another corpus"
    )
