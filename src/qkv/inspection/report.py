"""What an inspection found, and how it is shown: text for a terminal, data for programs."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from qkv.inspection.steps import Step, parts
from qkv.inspection.verdict import Verdict
from qkv.spec import Model
from qkv.spec.serial import to_data

WIDTH, NAME, LABEL = 110, 44, 14


@dataclass(frozen=True)
class Inspection:
    """A model as its files describe it.

    `model` is None where the files describe something this library has no words for; `unknown`
    lists what was found and not understood, `unstated` what the files leave open. `evidence` holds
    the configuration's keys and values that were read.
    """

    name: str
    model: Model | None
    steps: tuple[Step, ...]
    verdict: Verdict
    context: int | None
    stored: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def title(self) -> str:
        if self.model is None:
            return self.name
        return f"{self.name:<{NAME}} {self.size}"

    @property
    def size(self) -> str:
        """Parameters, and how much room they take where the files say how they are stored."""
        if self.model is None:
            return "its structure could not be described"
        count, stored = self.model.parameters(), self.stored
        if stored is None:
            return f"{count:,} parameters"
        if stored not in BYTES:
            return f"{count:,} parameters, stored as {stored}"
        return f"{count:,} parameters, {_decimal(count * BYTES[stored])} in {stored}"

    def lines(self, width: int | None = None) -> Iterator[str]:
        """The eight steps in aligned columns; `width` None is the terminal's, up to WIDTH."""
        width = width or terminal_width()
        yield from heading(self, width)
        yield ""
        for step in self.steps:
            label = f"{step.number} {step.title}"
            for line in step.lines:
                yield from wrapped(label, line, width)
                label = ""
            keys = ", ".join(keys_of(step, self.evidence))
            if keys:
                yield from wrapped("", f"from {keys}", width)
        if self.unknown:
            yield ""
            yield from wrapped("Not known", "; ".join(self.unknown), width)
        if self.unstated:
            yield ""
            yield from wrapped("Not stated", "in the files: " + "; ".join(self.unstated), width)

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        model = self.model
        return {
            "name": self.name,
            "parameters": model.parameters() if model else None,
            "active_parameters": model.parameters(active=True) if model else None,
            "parts": dict(parts(model)) if model else None,
            "stored": self.stored,
            "context": self.context,
            "verdict": asdict(self.verdict),
            "cache_bytes_at_context": model.cache_bytes(self.context) if model and self.context else None,
            "steps": [
                {
                    "number": step.number,
                    "title": step.title,
                    "lines": list(step.lines),
                    "evidence": {key: self.evidence[key] for key in keys_of(step, self.evidence)},
                }
                for step in self.steps
            ],
            "unknown": list(self.unknown),
            "unstated": list(self.unstated),
            "description": to_data(model) if model else None,
        }


BYTES: dict[str, float] = {"bfloat16": 2, "float16": 2, "float32": 4}


def _decimal(count: float) -> str:
    """Bytes of files, in decimal units as they are listed."""
    unit, size = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / size:,.1f} {unit}"


# which keys speak of which step: a word of the key's own name
WORDS = {
    "Tokens": ("vocab", "patch", "image", "mel", "channels", "embedding_multiplier"),
    "Size": (
        "hidden_size",
        "layers",
        "n_embd",
        "d_model",
        "n_layer",
        "depth",
        "dim",
        "block_count",
        "embedding_length",
    ),
    "Attention": ("head", "attention", "attn", "lora_rank", "qk_", "qkv", "linear_", "d_kv"),
    "Positions": ("position", "alibi", "n_ctx", "max_seq_len", "relative", "context_length"),
    "Block": (
        "norm",
        "eps",
        "intermediate",
        "ffn",
        "ff",
        "act",
        "expert",
        "mlp",
        "residual",
        "parallel",
        "moe",
        "topk",
        "n_group",
        "scoring",
        "first_k_dense",
        "routed",
        "swiglu",
    ),
    "Visibility": ("window", "layer_types", "chunk", "causal"),
    "Head": ("tie_", "architectures", "logit", "softcapping"),
}


def keys_of(step: Step, evidence: Mapping[str, Any]) -> list[str]:
    """The keys that were read for a step."""
    return [key for key in evidence if _step_of(key) == step.title]


def _step_of(key: str) -> str | None:
    """The first step that claims a key; more particular words come first."""
    if "rope" in key or "rotary" in key:
        return "Positions"
    leaf = key.rsplit(".", 1)[-1].lower()
    order = ("Visibility", "Head", "Positions", "Block", "Tokens", "Attention", "Size")
    if "head_count" in leaf or leaf.endswith("heads"):
        return "Attention"
    return next((title for title in order if any(word in leaf for word in WORDS[title])), None)


def terminal_width() -> int:
    """Of the terminal, or WIDTH where there is none; lines longer than WIDTH are hard to read."""
    return max(40, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def heading(found: Inspection, width: int, sign: str = "") -> Iterator[str]:
    """The title, on two lines where one does not hold it."""
    one = f"{sign}{found.title}"
    yield from (one,) if len(one) <= width else (f"{sign}{found.name}", " " * len(sign) + found.size)


def wrapped(label: str, line: str, width: int) -> Iterator[str]:
    for part in textwrap.wrap(line, width - LABEL, break_on_hyphens=False) or [""]:
        yield f"{label:<{LABEL}}{part}"
        label = ""
