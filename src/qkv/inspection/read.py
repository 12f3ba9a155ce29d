"""From a source to an inspection: small files only, no weights, no torch; lenient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qkv.errors import QkvError, SourceError
from qkv.families import Description, Record, describe, describe_gguf, sentence
from qkv.families.config import IRRELEVANT
from qkv.inspection.report import Inspection
from qkv.inspection.steps import Step, Subject, steps
from qkv.inspection.tokenizer import read_head, tokenizer_words
from qkv.inspection.verdict import Verdict, verdict
from qkv.sources import WEIGHT_FILES, find, read_json
from qkv.spec import Learned, Model, PooledEmbedding
from qkv.spec.heads import MultiToken


@dataclass(frozen=True)
class Files:
    """What the small files of a source say.

    `pieces` is a tokenizer.json without its vocabulary; `embeds` is the head that modules beside the
    model amount to; `tensors` are shapes where a file's header
    gives them.
    """

    name: str
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[str, Any] = field(default_factory=dict)
    gguf: Mapping[str, Any] | None = None
    embeds: PooledEmbedding | None = None
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
        read_head(beside / "tokenizer.json"),
        embeds=_embeds(beside),
    )


def _embeds(folder: Path) -> PooledEmbedding | None:
    """None too where modules are not known: the model itself is."""
    try:
        found = sentence.files(folder)
        return sentence.head(found) if found else None
    except QkvError:
        return None


def _open_gguf(path: Path) -> Files:
    from qkv.checkpoints import read_gguf  # here: a config.json needs no arrays

    file = read_gguf(path)
    return Files(path.name, {}, gguf=file.metadata, tensors=file.tensors)


def inspect_files(files: Files) -> Inspection:
    """The inspection of what was read."""
    record = Record()
    try:
        described = _describe(files, record)
    except QkvError as problem:
        return _undescribed(files, str(problem))
    packed: dict[str, Any] = {}
    for key in ("quantization_config", "quantization"):  # the second is MLX's
        if isinstance(files.config.get(key), dict):
            packed = packed or files.config[key]
            record.unknown.pop(key, None)  # it changes nothing of the structure, and is told with the size
    context, found = _context(files, described, _context_key(files))
    subject = Subject(
        described.model,
        found,
        context,
        tokenizer_words(files.tokenizer, files.pieces, files.gguf),
        packed=_packed_words(packed) if packed else None,
        further=_further(files.config, described.model),
    )
    dtype = files.config.get("dtype") or files.config.get("torch_dtype")
    return Inspection(
        name=files.name,
        model=described.model,
        steps=steps(subject),
        verdict=found,
        context=context,
        stored=str(packed.get("quant_method", "another format")) if packed else dtype,
        evidence=record.taken,
        unknown=tuple(f"{key} = {value!r}"[:160] for key, value in record.unknown.items()),
        unstated=tuple(_unstated(files, found, described.model)),
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


def _context_key(files: Files) -> str:
    """Where the length stands in the file; what is not there is the architecture's own."""
    if files.gguf is not None:
        return next((key for key in files.gguf if key.endswith(".context_length")), CONTEXT_KEYS[0])
    text = files.config.get("text_config")
    inner = {f"text_config.{key}" for key in text} if isinstance(text, dict) else set()
    return next((k for k in CONTEXT_KEYS if k in files.config or k in inner), DEFAULT)


DEFAULT = "the architecture's default"


def _packed_words(packed: Mapping[str, Any]) -> str:
    """How weights are stored where they are quantised, in the file's own terms."""
    words = [f"weights packed as {packed.get('quant_method', 'something not named')}"]
    for key, name in (("fmt", ""), ("bits", " bits"), ("weight_block_size", " blocks")):
        value = packed.get(key)
        if isinstance(value, list):
            value = " x ".join(map(str, value))
        if value is not None:
            words.append(f"{value}{name}")
    kept = packed.get("modules_to_not_convert")
    if not isinstance(kept, list) or not kept:
        return ", ".join(words)
    others = " and others" if len(kept) > 6 else ""
    return f"{', '.join(words)}; not {', '.join(map(str, kept[:6]))}{others}"


def _further(config: Mapping[str, Any], model: Model) -> int:
    """Layers for guessing ahead that the configuration names and the description leaves out."""
    text = config.get("text_config")
    found = {**config, **text} if isinstance(text, dict) else config
    names = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
    count = next((found[name] for name in names if found.get(name)), None)
    return count if isinstance(count, int) and not isinstance(model.head, MultiToken) else 0


def _describe(files: Files, record: Record) -> Description:
    if files.gguf is not None:
        return describe_gguf(files.gguf, files.tensors, files.name, record=record)
    found = describe(files.config, "config.json", record=record)
    if files.embeds is not None:
        found = replace(found, model=replace(found.model, head=files.embeds))
    return found


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


def _unstated(files: Files, context: Verdict, model: Model) -> list[str]:
    """What people ask and these files do not answer."""
    found = ["the training objective beyond the head's own"]
    if context.configured is not None:
        found.append("how far training went on after the positions were scaled")
    if files.gguf is None and not files.tokenizer and not files.pieces:
        found.append(
            "the tokenizer (neither tokenizer.json nor tokenizer_config.json beside the configuration)"
        )
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
        unknown=(problem, *sorted(data.keys() - IRRELEVANT - set(sum(SHARED.values(), ())))),
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
