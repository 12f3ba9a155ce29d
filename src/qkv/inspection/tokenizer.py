"""What a tokenizer's own files say of it, without its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST = 8 << 20  # bytes: what stands before a vocabulary is far smaller
GGUF_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "bert": "WordPiece", "t5": "Unigram"}


def read_head(path: Path) -> dict[str, Any]:
    """The parts of a tokenizer.json up to its vocabulary, which comes last; {} where that fails."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST)
        before, found, _ = text.partition(b'"vocab"')
        head = json.loads(before + b'"vocab": null}}') if found else {}
    except (OSError, ValueError):
        return {}
    return head if isinstance(head, dict) else {}


def tokenizer_words(
    config: Mapping[str, Any], head: Mapping[str, Any], gguf: Mapping[str, Any] | None
) -> str | None:
    """One line: its kind, or its class where only that is known, and what it puts around a text."""
    if gguf is not None:
        model = str(gguf.get("tokenizer.ggml.model", ""))
        return f"tokenizer in the file: {GGUF_KINDS.get(model, model)}" if model else None
    kind, name = _kind(head), config.get("tokenizer_class")
    begin, end = _around(head)
    if not begin and config.get("add_bos_token"):
        token = config.get("bos_token")
        begin = str((token.get("content") if isinstance(token, dict) else token) or "")
    words = f"tokenizer: {kind}" if kind else f"tokenizer class {name}" if name else ""
    words += f", begins with {begin}" if words and begin else ""
    words += f", ends with {end}" if words and end else ""
    return words or None


def _kind(head: Mapping[str, Any]) -> str | None:
    """BPE, Unigram, WordPiece or WordLevel, and whether it works on bytes."""
    model = head.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(kind, str) or not isinstance(model, dict):
        return None
    if kind == "BPE" and "ByteLevel" in _types(head.get("pre_tokenizer")):
        return "byte-level BPE"
    return f"{kind} with bytes to fall back on" if model.get("byte_fallback") else kind


def _types(part: Any) -> Iterator[str]:
    """The types of a part and of all it is a sequence of."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for inner in part.values():
            yield from _types(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _types(inner)


def _around(head: Mapping[str, Any]) -> tuple[str, str]:
    """What the post-processor puts before and after a single text."""
    post = head.get("post_processor")
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if isinstance(step, dict) else None
        if isinstance(single, list):
            return _named(single, before=True), _named(single, before=False)
    return "", ""


def _named(single: list[Any], *, before: bool) -> str:
    """The special tokens of a template that stand on one side of the text."""
    pieces = [piece for piece in single if isinstance(piece, dict)]
    text = next((i for i, piece in enumerate(pieces) if "Sequence" in piece), len(pieces))
    side = pieces[:text] if before else pieces[text + 1 :]
    tokens = (piece.get("SpecialToken") for piece in side)
    return " ".join(str(token.get("id")) for token in tokens if isinstance(token, dict))
