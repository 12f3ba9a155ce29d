"""From a source to a model with its weights: find the files, describe, build, fill, check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoints import FORMATS, StoredTensor, read_gguf, read_safetensors
from qkv.errors import CapacityError, CheckpointError, RequestError, SourceError, UnsupportedError
from qkv.families import Description, describe, describe_gguf
from qkv.memory import free_memory
from qkv.nn import Transformer, tie
from qkv.sources import WEIGHT_FILES, find, read_json
from qkv.spec import Tokens
from qkv.text import Tokenizer, from_folder, from_gguf

Progress = Callable[[int, int], None]  # tensors done, tensors in all


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(frozen=True)
class Loaded:
    """What a source holds. `generation` is its generation_config.json, {} where there is none."""

    model: Transformer
    tokenizer: Tokenizer | None
    context: int | None
    eos_ids: frozenset[int]
    source: Path
    description: Description
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        """How many token ids the model knows."""
        tokens = self.model.spec.trunk.input
        return tokens.vocab if isinstance(tokens, Tokens) else 0


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    ignore: Iterable[str] = (),
    progress: Progress | None = None,
) -> Loaded:
    """Reads a model and its weights.

    `source`: a folder in Hugging Face layout (or its config.json, or one weight file in it), a .gguf
    file, a hub name ("org/name"), or a packaged model ("smollm2"). `dtype` None follows the file
    (quantised weights become float32). `ignore` names configuration keys or patterns of tensors to
    do without.

    Raises a QkvError: of the source, its configuration, its weights or its tokenizer, or for more
    memory than is free. Nothing is half loaded.
    """
    path, ignore, where = find(source), tuple(ignore), _device(device)
    in_folder = path.is_dir() or path.name.endswith(WEIGHT_FILES)
    files = _open_folder(path, ignore) if in_folder else _open_gguf(path, ignore)
    model = fill(files, _dtype(dtype, files.tensors), where, ignore, progress)
    ends = frozenset(_ids(files.generation.get("eos_token_id")) + _ids(files.config.get("eos_token_id")))
    if files.tokenizer is not None:
        ends |= files.tokenizer.eos_ids
    return Loaded(
        model=model,
        tokenizer=files.tokenizer,
        context=files.description.context,
        eos_ids=ends,
        source=path,
        description=files.description,
        config=files.config,
        generation=files.generation,
    )


@dataclass(frozen=True)
class _Files:
    """What the files of a source say, before a model is built."""

    name: str
    description: Description
    tensors: Mapping[str, StoredTensor]
    tokenizer: Tokenizer | None
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


def _open_gguf(path: Path, ignore: tuple[str, ...]) -> _Files:
    file = read_gguf(path)
    description = describe_gguf(file.metadata, file.tensors, path.name, ignore)
    tokenizer = from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None
    return _Files(path.name, description, file.tensors, tokenizer)


def _open_folder(path: Path, ignore: tuple[str, ...]) -> _Files:
    """A folder, or the weight file in it that is meant."""
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json")
    if config is None:
        raise SourceError(f"{folder} has no config.json; a model folder holds one beside its weights.")
    description, tensors = describe(config, "config.json", ignore), read_safetensors(path)
    if not any(name.startswith(description.prefix) for name in tensors):
        description = description.bare()
    tokenizer = from_folder(folder) if (folder / "tokenizer.json").is_file() else None
    generation = read_json(folder / "generation_config.json") or {}
    return _Files(path.name, description, tensors, tokenizer, config, generation)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _dtype(asked: torch.dtype | str | None, tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """What was asked for, else the type most of the file is stored in."""
    if asked is not None:
        found = getattr(torch, asked, None) if isinstance(asked, str) else asked
        if not isinstance(found, torch.dtype) or found not in FLOATS.values():
            raise RequestError(f"dtype {asked!r} is not known (float32, bfloat16, float16, float64).")
        return found
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return FLOATS.get(max(sizes, key=sizes.__getitem__, default=""), torch.float32)


def _device(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        reason = str(problem).splitlines()[0].rstrip(".")
        raise RequestError(f"device {str(asked)!r} cannot be used here: {reason}.") from None
    return device


def fill(
    files: _Files,
    dtype: torch.dtype,
    device: torch.device,
    ignore: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Transformer:
    """The model with every parameter from the files; every tensor used, or known not to matter."""
    if not files.description.weights:
        raise UnsupportedError(f"{files.name}: this kind of model can be inspected but not loaded yet.")
    names = {ours: _their_name(ours, files.description.weights) for ours in files.description.model.weights()}
    _check_names(files, names, ignore)
    _check_tensors(files, names)
    _check_memory(files, dtype, device)
    # built once the files have proven the sizes: a configuration alone could ask for anything
    with torch.device("meta"):
        model = Transformer(files.description.model).requires_grad_(False)
    state = {}
    for done, (ours, theirs) in enumerate(names.items(), 1):
        try:
            state[ours] = _converted(files.tensors[theirs], dtype, device)
        except (MemoryError, RuntimeError) as problem:
            if "memory" not in str(problem) and not isinstance(problem, MemoryError):
                raise
            raise _too_large(files, dtype, None) from None
        if progress is not None:
            progress(done, len(names))
    model.load_state_dict(state, strict=False, assign=True)
    tie(model, files.description.model)
    return model.eval()


def _their_name(ours: str, weights: Mapping[str, str]) -> str:
    number = re.search(r"layers\.(\d+)\.", ours)
    general = ours.replace(f"layers.{number[1]}.", "layers.{layer}.", 1) if number else ours
    if general not in weights:
        raise CheckpointError(f"No checkpoint name is known for {ours}.")
    return weights[general].replace("{layer}", number[1] if number else "")


def _check_names(files: _Files, names: Mapping[str, str], ignore: tuple[str, ...]) -> None:
    missing = [theirs for theirs in names.values() if theirs not in files.tensors]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{files.name} lacks {missing[0]}{more}, which its configuration calls for.")
    unused = files.tensors.keys() - set(names.values())
    patterns = (*files.description.irrelevant, *ignore)
    copies = _tied_copies(files, names)
    for name in sorted(unused):
        if name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if name not in copies:
            problem = "which its configuration has no place for"
        elif not _same(files.tensors[name], files.tensors[copies[name]]):
            problem = f"which differs from {copies[name]} though its configuration ties the two"
        else:
            continue
        raise CheckpointError(
            f'{files.name} holds {name}, {problem}. Pass ignore=("{name}",) to load without it.'
        )


def _tied_copies(files: _Files, names: Mapping[str, str]) -> dict[str, str]:
    """A shared tensor's further names, as some tools save tied heads twice, and the name it is read by."""
    shared = {tensor.name: tensor.key for tensor in files.description.model.tensors()}
    first = {shared[ours]: theirs for ours, theirs in names.items()}
    return {
        _their_name(ours, files.description.weights): first[key]
        for ours, key in shared.items()
        if ours not in names
    }


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    return (a.format, a.shape) == (b.format, b.shape) and bool((a.data == b.data).all())


def _check_tensors(files: _Files, names: Mapping[str, str]) -> None:
    for ours, tensor in files.description.model.weights().items():
        stored = files.tensors[names[ours]]
        if stored.shape != tensor.shape:
            raise CheckpointError(
                f"{files.name}: {stored.name} has shape {stored.shape}; "
                f"the configuration makes it {tensor.shape}."
            )
        plain = FORMATS[stored.format].dtype
        if plain is not None and plain.kind != "f":
            raise CheckpointError(
                f"{files.name}: {stored.name} is stored as {stored.format}; "
                "a weight must be a floating-point number, or in a block format of GGUF."
            )


def _check_memory(files: _Files, dtype: torch.dtype, device: torch.device) -> None:
    """Before anything is allocated: a process that takes too much is killed without a word."""
    free = free_memory(device)
    if free is not None and _needed(files, dtype) > free:
        raise _too_large(files, dtype, free)


def _needed(files: _Files, dtype: torch.dtype) -> int:
    return files.description.model.parameters() * dtype.itemsize


def _too_large(files: _Files, dtype: torch.dtype, free: int | None) -> CapacityError:
    kind, there = str(dtype).removeprefix("torch."), "less" if free is None else _gigabytes(free)
    way_on = 'load it with dtype="bfloat16", or choose' if dtype.itemsize > 2 else "choose"
    return CapacityError(
        f"{files.name} needs {_gigabytes(_needed(files, dtype))} of memory as {kind}, and {there} is free: "
        f"{way_on} a smaller model."
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _converted(stored: StoredTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = to_torch(stored)
    found = values.to(device=device, dtype=dtype)
    if dtype == torch.float16 and values.dtype != dtype and not bool(found.isfinite().all()):
        raise CheckpointError(
            f'{stored.name} holds values that float16 cannot: load with dtype="bfloat16" or "float32".'
        )
    return found


def to_torch(stored: StoredTensor) -> torch.Tensor:
    """The values as a tensor of its own memory; bfloat16 keeps its bits."""
    if stored.format == "BF16":
        bits = torch.from_numpy(stored.data.copy()).view(torch.bfloat16)
        return bits.view(stored.shape)
    values = stored.decode()
    return torch.from_numpy(values if values.flags.owndata and values.flags.writeable else values.copy())


def checkpoint_names(loaded: Loaded) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter under its name in a checkpoint, shared ones once: the weight table read backwards."""
    parameters = dict(loaded.model.named_parameters(remove_duplicate=False))
    for ours in loaded.description.model.weights():
        yield _their_name(ours, loaded.description.weights), parameters[ours]
