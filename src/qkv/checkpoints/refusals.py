"""Files that are not what they seem, each refused in one sentence."""

import os
from pathlib import Path
from typing import NoReturn

from qkv.errors import CheckpointError, SourceError

ZIP = b"PK\x03\x04"  # what torch.save has written since version 1.6, with the pickle inside


def refuse_pickle(path: Path) -> NoReturn:
    """Raise `CheckpointError`: a pickle is a program, and loading it runs that program."""
    raise CheckpointError(
        f"{path.name} is a pickle, and loading one runs any code it carries; convert it to safetensors first "
        "(torch.load with weights_only=True, then safetensors.torch.save_file)."
    )


def is_pickle(path: Path) -> bool:
    """Whether a file in a model's folder is a pickle, by its name or, for `.bin`, by its first bytes."""
    if path.suffix == ".bin":  # CTranslate2 and others write files of that name, too
        return path.name.startswith("pytorch_model") or _begins_like_a_pickle(_start(path))
    return path.suffix in (".pt", ".pth", ".ckpt", ".pkl")


def refuse_impostor(path: Path, wanted: str) -> None:
    """Raise `CheckpointError` if the first bytes of `path` show another kind of file than `wanted`.

    Called once a file has turned out not to be a `wanted` file, never before: a sound safetensors file
    whose header is 640 bytes long begins exactly like a pickle.
    """
    start = _start(path)
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path.name} is a Git LFS pointer, not the file it stands for; fetch that with `git lfs pull`."
        )
    if _begins_like_a_pickle(start):
        refuse_pickle(path)
    if start.startswith(b"GGUF") and wanted != "GGUF":
        raise CheckpointError(f"{path.name} is a GGUF file and not {wanted}; rename it to end in .gguf.")
    if start[5:9] == b"\0\0\0{" and wanted != "safetensors":
        raise CheckpointError(
            f"{path.name} is safetensors and not {wanted}; rename it to end in .safetensors."
        )
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(f"{path.name} is a web page and not {wanted}; the download went wrong.")


def require_file(path: Path) -> None:
    """Raise `SourceError` unless `path` is a file that can be read; a pipe or a device would never end."""
    if not path.exists():
        raise SourceError(f"{path} does not exist.")
    if not path.is_file():
        raise SourceError(f"{path} is not a file.")
    if not os.access(path, os.R_OK):
        raise SourceError(f"{path} may not be read by this user.")


def shown(name: str, limit: int = 100) -> str:
    """A name from a file, fit to print: short, on one line, without control characters."""
    if len(name) > limit:
        name = name[:limit] + "..."
    return name if name and name.isprintable() else ascii(name)


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def _begins_like_a_pickle(start: bytes) -> bool:
    return start.startswith(ZIP) or (start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"))
