"""From a source to an inspection: small files only, no weights, no torch; lenient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.checkpoints import read_gguf
from qkv.errors import QkvError, SourceError
from qkv.families import Description, Record, describe, describe_gguf
from qkv.inspection.report import Inspection
from qkv.inspection.steps import Step, Subject, steps
from qkv.inspection.verdict import Verdict, verdict
from qkv.sources import WEIGHT_FILES, find, read_json
from qkv.spec import Learned


@dataclass(frozen=True)
class Files:
    """What the small files of a source say. `tensors` are shapes where a file's header gives them."""

    name: str
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)


def inspect(source: str | Path) -> Inspection:
    """Reads a model's structure and its real context from its small files.

    `source`: a folder, a config.json, a .gguf file, a hub name, a packaged name. What is not
    understood is listed in the result; only a source that cannot be read at all raises.
    """
    path = _config_or_files(source)
    return inspect_files(_open_gguf(path) if path.suffix.lower() == ".gguf" else _open_json(path))


def _config_or_files(source: str | Path) -> Path:
    """As `find`, but a configuration alone is enough, whatever it is called."""
    named = isinstance(source, str | Path) and str(source).endswith(".json")
    if named and Path(source).expanduser().is_file():
        return Path(source).expanduser()
    found = find(source)
    if found.name.endswith(WEIGHT_FILES):
        found = found.parent
    return found / "config.json" if found.is_dir() else found


def _open_json(path: Path) -> Files:
    config = read_json(path)
    if config is None:
        raise SourceError(f"{path.parent} has no config.json; a model folder holds one beside its weights.")
    beside = path.parent if path.name == "config.json" else Path("/nonexistent")
    name = path.parent.name if path.name == "config.json" else path.name
    if path.parent.parent.name == "snapshots":  # the hub's cache names folders by revision
        name = path.parents[2].name.removeprefix("models--").replace("--", "/")
    return Files(
        name or str(path),
        config,
        read_json(beside / "tokenizer_config.json") or {},
        read_json(beside / "generation_config.json") or {},
    )


def _open_gguf(path: Path) -> Files:
    file = read_gguf(path)
    return Files(path.name, {}, gguf=file.metadata, tensors=file.tensors)


def inspect_files(files: Files) -> Inspection:
    """The inspection of what was read."""
    record = Record()
    try:
        described = _describe(files, record)
    except QkvError as problem:
        return _undescribed(files, str(problem))
    unknown = tuple(f"{key} = {value!r}"[:160] for key, value in record.unknown.items())
    key = next((k for k in CONTEXT_KEYS if k in record.taken), "max_position_embeddings")
    context, found = _context(files, described, key)
    subject = Subject(described.model, found, context, _tokenizer_words(files))
    return Inspection(
        name=files.name,
        model=described.model,
        steps=steps(subject),
        verdict=found,
        context=context,
        stored=files.config.get("dtype") or files.config.get("torch_dtype"),
        evidence=record.taken,
        unknown=unknown,
        unstated=tuple(_unstated(files)),
    )


CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_seq_len",
    "max_target_positions",
    "text_config.max_position_embeddings",
)


def _describe(files: Files, record: Record) -> Description:
    if files.gguf is not None:
        return describe_gguf(files.gguf, files.tensors, files.name, record=record)
    return describe(files.config, "config.json", record=record)


def _context(files: Files, described: Description, key: str) -> tuple[int | None, Verdict]:
    found = verdict(
        described.model, described.context, tokenizer=files.tokenizer, config=files.config, key=key
    )
    position = getattr(described.model.trunk.input, "position", None)
    context = described.context
    if isinstance(position, Learned):
        context = position.rows - position.offset
    elif found.configured is not None:
        context = found.configured.positions
    return context, found


def _tokenizer_words(files: Files) -> str | None:
    """A line on the tokenizer, from its own files."""
    if files.gguf is not None:
        kind = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "bert": "WordPiece", "t5": "Unigram"}
        model = str(files.gguf.get("tokenizer.ggml.model", ""))
        return f"tokenizer in the file: {kind.get(model, model)}" if model else None
    name, begin = files.tokenizer.get("tokenizer_class"), files.tokenizer.get("bos_token")
    begin = begin.get("content") if isinstance(begin, dict) else begin
    adds = f", begins with {begin}" if begin and files.tokenizer.get("add_bos_token") else ""
    return f"tokenizer: {name}{adds}" if name else None


def _unstated(files: Files) -> list[str]:
    """What people ask and these files do not answer."""
    found = ["the training objective beyond the head's own"]
    if files.gguf is None and not files.tokenizer:
        found.append("the tokenizer (no tokenizer_config.json beside the configuration)")
    return found


def _undescribed(files: Files, problem: str) -> Inspection:
    """For what no family describes: the figures under names that nearly all configurations share."""
    config = files.config or {k.split(".", 1)[-1]: v for k, v in (files.gguf or {}).items()}
    text = config.get("text_config")
    data = {**config, **text} if isinstance(text, dict) else dict(config)
    lines: dict[str, list[str]] = {}
    for title, keys in SHARED.items():
        lines[title] = [
            f"{key} = {data[key]!r}" for key in keys if isinstance(data.get(key), int | float | str)
        ]
    numbered = [Step(i + 1, title, tuple(found)) for i, (title, found) in enumerate(lines.items()) if found]
    context = data.get("max_position_embeddings")
    return Inspection(
        name=files.name,
        model=None,
        steps=tuple(numbered),
        verdict=Verdict(notes=("the structure is not known, so neither is the context",)),
        context=context if isinstance(context, int) else None,
        evidence={key: data[key] for keys in SHARED.values() for key in keys if key in data},
        unknown=(problem, *sorted(data.keys() - set(sum(SHARED.values(), ())))),
    )


SHARED = {
    "Tokens": ("model_type", "vocab_size"),
    "Size": ("num_hidden_layers", "hidden_size"),
    "Attention": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "Positions": ("max_position_embeddings", "rope_theta"),
    "Block": ("rms_norm_eps", "intermediate_size", "hidden_act", "num_experts", "n_routed_experts"),
    "Visibility": ("sliding_window",),
    "Head": ("tie_word_embeddings",),
}
