"""What the files of a source say, before a model is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkv.checkpoints import StoredTensor, read_gguf, read_safetensors
from qkv.errors import CheckpointError, RequestError, SourceError
from qkv.families import Description, describe, describe_gguf, family_of, gguf, sentence
from qkv.generation_config import NAME as GENERATION, check, ends
from qkv.sources import WEIGHT_FILES, read_json
from qkv.text import Tokenizer, from_folder, from_gguf


@dataclass(frozen=True)
class Files:
    """What a source holds, without the keys that were ignored.

    `path` is the folder or the weight file. `tensors` are still mapped, by their names of today.
    `ends` are the tokens that end a text. `ignored` are the entries of `ignore` that named a key.
    `config` is its config.json and `generation` its generation_config.json, {} where there is none.
    `modules` are the files that say how it embeds, by name.
    """

    path: Path
    description: Description
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None = None
    ends: frozenset[int] = frozenset()
    ignored: frozenset[str] = frozenset()
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As errors call it."""
        return self.path.name


def in_folder(path: Path) -> bool:
    """Whether what `find` gave is a folder in Hugging Face layout, or a weight file in one."""
    return path.is_dir() or path.name.endswith(WEIGHT_FILES)


def opened(path: Path, ignore: tuple[str, ...] = ()) -> Files:
    """What the files say, each tensor still mapped."""
    return _open_folder(path, ignore) if in_folder(path) else _open_gguf(path, ignore)


def entries(ignore: str | Iterable[str] | None) -> tuple[str, ...]:
    """What to ignore as a tuple, of names that can be."""
    if isinstance(ignore, str):
        ignore = (ignore,)
    entries = tuple(ignore) if isinstance(ignore, Iterable) else () if ignore is None else (ignore,)
    if not all(isinstance(entry, str) for entry in entries):
        raise RequestError(f"ignore is {ignore!r}; it must name a key or a tensor, or be a list of names.")
    for entry in entries:
        if entry in ("model_type", "architectures"):
            raise RequestError(
                f"{entry} says which model this is, so it cannot be ignored: "
                "correct config.json if it says the wrong thing."
            )
    return entries


def _without(data: Any, ignore: Iterable[str], found: set[str]) -> Any:
    """The data without the keys to ignore, at any level; those there were are added to `found`."""
    if isinstance(data, list):
        return [_without(value, ignore, found) for value in data]
    if not isinstance(data, dict):
        return data
    found |= data.keys() & set(ignore)
    return {key: _without(value, ignore, found) for key, value in data.items() if key not in ignore}


def _open_gguf(path: Path, ignore: tuple[str, ...]) -> Files:
    """A GGUF file. Its keys can be ignored by their own names or by those of a config.json."""
    file, ignored = read_gguf(path), set[str]()
    called = gguf.names(str(file.metadata.get("general.architecture")))
    ignored |= set(ignore) & {called.get(key) for key in file.metadata}
    ignored |= set(ignore) & file.metadata.keys()
    metadata = {key: value for key, value in file.metadata.items() if key not in ignore}
    # the description reads this one, so it has to go before
    left_out = set(gguf.IRRELEVANT) & set(ignore)
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in left_out}
    if "rope_freqs.weight" in tensors or any(".rope.scaling." in key for key in metadata):
        ignored |= {"rope_scaling"} & set(ignore)
    description = describe_gguf(metadata, tensors, path.name, ignore)
    tokenizer = from_gguf(metadata) if "tokenizer.ggml.model" in metadata else None
    stops = tokenizer.eos_ids if tokenizer else frozenset[int]()
    return Files(path, description, file.tensors, tokenizer, stops, frozenset(ignored))


def _open_folder(path: Path, ignore: tuple[str, ...]) -> Files:
    """A folder, or the weight file in it that is meant."""
    folder = path if path.is_dir() else path.parent
    found, ignored = read_json(folder / "config.json"), set[str]()
    if found is None:
        raise SourceError(f"{folder} has no config.json; a model folder holds one beside its weights.")
    kind = found.get("model_type")
    defaults = family_of(kind, "config.json").defaults.get(str(kind), {}).keys() & set(ignore)
    # null: were they absent, they would have the values of the class that wrote the file
    config = _without(found, ignore, ignored) | dict.fromkeys(defaults)
    generation = _without(read_json(folder / GENERATION) or {}, ignore, ignored)
    check(generation)
    description, tensors = describe(config, "config.json", ignore), read_safetensors(path)
    ignored |= {sentence.MODULES} & set(ignore) if (folder / sentence.MODULES).is_file() else set()
    modules = {} if sentence.MODULES in ignored else sentence.files(folder)
    if modules:
        description = replace(description, model=replace(description.model, head=sentence.head(modules)))
    tensors = _today(path.name, tensors, description)
    if not any(name.startswith(description.prefix) for name in tensors):
        description = description.bare()
    tokenizer = from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    stops = ends(generation, GENERATION) | ends(config, "config.json")
    stops |= tokenizer.eos_ids if tokenizer else frozenset()
    ignored |= defaults
    return Files(
        path, description, tensors, tokenizer, stops, frozenset(ignored), config, generation, modules
    )


def _today(
    source: str, tensors: Mapping[str, StoredTensor], description: Description
) -> dict[str, StoredTensor]:
    """The tensors by their names of today."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        start = next((start for start in description.moved if name.startswith(start)), "")
        end = next((end for end in description.older if name.endswith(end)), "")
        now = description.moved.get(start, "") + name.removeprefix(start)
        now = now.removesuffix(end) + description.older.get(end, "")
        if now in found:
            raise CheckpointError(f"{source} holds {now} twice, under another name as well.")
        found[now] = tensor
    return found
