"""A description as the keys and tensors of a GGUF file: what `gguf` reads, the other way. No torch.

Nothing is taken to have been said: the keys are read back, and what comes out must be the model
that went in. A model that the architecture cannot say in full is refused, with what would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from qkv.errors import CheckpointError, ConfigError, UnsupportedError
from qkv.families import Description, describe_gguf
from qkv.families.architectures import ARCHITECTURES, KEYS, Architecture, whole_norms
from qkv.families.weights import Shape, WeightMap
from qkv.spec import (
    Attention,
    Dense,
    Divided,
    Experts,
    Gated,
    Interpolation,
    Language,
    LayerNorm,
    Llama3,
    LongRope,
    Model,
    RMSNorm,
    Rotary,
    Scaling,
    Tokens,
    Window,
    Yarn,
)
from qkv.spec.difference import difference
from qkv.spec.node import Node
from qkv.spec.rotary import inverse_frequencies, mscale

Kind = TypeVar("Kind", bound=Node)

# model types that are written as an architecture of another name
CALLED = {"mistral": "llama", "internlm": "llama", "gemma3_text": "gemma3"}
ROUNDING = 1e-6  # files hold float32


class Shaped(NamedTuple):
    """A tensor of which only the shape is known yet."""

    shape: Shape


@dataclass(frozen=True)
class Written:
    """What a file of an architecture would hold: metadata, constants beside the parameters, their places.

    `heads` are those whose queries and keys have the rows of a rotated pair side by side, (query
    heads, key heads); None where rows stay. `offset` is what scales of norms gain.
    """

    kind: str
    metadata: Mapping[str, Any]
    constants: Mapping[str, np.ndarray]
    places: WeightMap
    heads: tuple[int, int] | None
    offset: float

    def value(self, ours: str, values: np.ndarray) -> np.ndarray:
        """A parameter as the file has it."""
        if self.offset and values.ndim == 1 and ours.endswith(".weight"):
            return values.astype(np.float32) + np.float32(self.offset)
        _, _, part = ours.rpartition(".attention.")
        stem = part.rpartition(".")[0]
        if self.heads is None or stem not in ("query", "key"):
            return values
        return interleaved(values, self.heads[stem == "key"])


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i and row i + half of each head side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def architecture_of(model_type: str, where: str) -> str:
    """What a model type's files are called in general.architecture."""
    found = CALLED.get(model_type) or next(
        (name for name, told in ARCHITECTURES.items() if told.family == model_type), None
    )
    if found is None:
        known = ", ".join(dict.fromkeys([*CALLED, *(told.family for told in ARCHITECTURES.values())]))
        raise UnsupportedError(
            f"{where}: models of type {model_type} cannot be written as GGUF yet ({known})."
        )
    return found


def written(description: Description, said: Mapping[str, Any], where: str) -> Written:
    """What the file of a model would hold. `said` is its config.json, with the defaults of its class."""
    kind = architecture_of(str(said.get("model_type")), where)
    told = ARCHITECTURES[kind]
    model = _as_stored(description.model, told)
    constants = _constants(description.model)
    try:
        shapes = {name: tensor.shape for name, tensor in model.weights().items()}
        places = WeightMap(shapes, told.weights(model.trunk.width))
    except CheckpointError as problem:
        raise UnsupportedError(f"{where} cannot be written as a GGUF of {kind}: {problem}") from None
    tensors = {name: Shaped(places.shape(name)) for name in places.theirs}
    # a window that hides nothing in so short a context is in no mask, but some families ask for it
    problems: list[str] = []
    for window in dict.fromkeys((None, said.get("sliding_window"))):
        metadata = _metadata(kind, told, description, {**said, "sliding_window": window})
        lost = _lost(metadata, {**tensors, **_stored(constants)}, where, replace(description, model=model))
        if lost is None:
            turned = told.interleaved and model != description.model and _turns(description.model)
            first = next(_each(model, Attention))
            heads = (first.heads, first.kv_heads) if turned else None
            return Written(kind, metadata, constants, places, heads, 1.0 if told.whole_norms else 0.0)
        problems.append(lost)
    raise UnsupportedError(f"{where} cannot be written as a GGUF of {kind}: {problems[0]}")


def _lost(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, wanted: Description
) -> str | None:
    """What reading the keys back does not give, as a sentence."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in metadata.items()}
    try:
        found = describe_gguf(plain, tensors, where)
    except ConfigError as problem:
        return str(problem)
    if found.context != wanted.context:
        return f"its keys give a context of {found.context} positions for {wanted.context}."
    for lost in difference(wanted.model, found.model):
        if not _close(lost.left, lost.right):
            return f"its keys give {lost}."
    return None


def _close(a: Any, b: Any) -> bool:
    try:
        left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    except (TypeError, ValueError):
        return False
    return left.shape == right.shape and bool(np.allclose(left, right, rtol=ROUNDING, atol=0))


class _Decoded(NamedTuple):
    """A constant, as the reader of a description asks for it."""

    shape: Shape
    values: np.ndarray

    def decode(self) -> np.ndarray:
        return self.values


def _stored(constants: Mapping[str, np.ndarray]) -> dict[str, _Decoded]:
    return {name: _Decoded(values.shape, values) for name, values in constants.items()}


def _each(part: Any, kind: type[Kind]) -> Iterator[Kind]:
    """Nodes of a kind in a description, in its order."""
    if isinstance(part, tuple):
        for item in part:
            yield from _each(item, kind)
    elif isinstance(part, Node):
        if isinstance(part, kind):
            yield part
        for name in fields(part):
            yield from _each(getattr(part, name.name), kind)


def _turns(model: Model) -> bool:
    """Whether any rotation has its pairs half a head apart."""
    return any(position.pairs == "half" for position in _each(model, Rotary))


def _as_stored(model: Model, told: Architecture) -> Model:
    """The model that the file is of: the same function of other tensors."""
    found: Model = whole_norms(model) if told.whole_norms else model
    return _with_rotations(found, told.interleaved)


def _with_rotations(part: Any, interleave: bool) -> Any:
    if isinstance(part, tuple):
        return tuple(_with_rotations(item, interleave) for item in part)
    if isinstance(part, Attention) and isinstance(part.position, Rotary):
        position = part.position
        if isinstance(position.scaling, Llama3):
            divisors = _divisors(position, part.head_dim)
            position = replace(position, scaling=Divided(tuple(float(each) for each in divisors)))
        if interleave:
            position = replace(position, pairs="interleaved")
        return replace(part, position=position)
    if not isinstance(part, Node):
        return part
    changed = {f.name: _with_rotations(getattr(part, f.name), interleave) for f in fields(part)}
    return replace(part, **changed)


def _divisors(position: Rotary, head_dim: int) -> np.ndarray:
    """What the frequency of each pair is divided by, where a scaling is no more than that."""
    dims = position.dims or head_dim
    scaled, _ = position.frequencies(head_dim, 1)
    return (inverse_frequencies(position.theta, dims) / scaled).astype(np.float32)


def _constants(model: Model) -> dict[str, np.ndarray]:
    """Tensors that hold a scaling."""
    for attention in _each(model, Attention):
        position = attention.position
        if isinstance(position, Rotary) and isinstance(position.scaling, Llama3):
            return {"rope_freqs.weight": _divisors(position, attention.head_dim)}
        if isinstance(position, Rotary) and isinstance(position.scaling, LongRope):
            return {
                "rope_factors_long.weight": np.array(position.scaling.long, np.float32),
                "rope_factors_short.weight": np.array(position.scaling.short, np.float32),
            }
    return {}


def _metadata(
    kind: str, told: Architecture, description: Description, said: Mapping[str, Any]
) -> dict[str, Any]:
    model = description.model
    attention = [*_each(model, Attention)]
    everywhere = [each for each in attention if not [*_each(each.mask, Window)]]
    values = {
        "max_position_embeddings": said.get("max_position_embeddings") or description.context,
        **_sizes(model, said),
        **_numbers(model, told),
        **_rotation(attention, everywhere),
    }
    first = attention[0] if attention else None
    if first is not None and first.heads * first.head_dim != model.trunk.width:
        values["head_dim"] = first.head_dim
    found = {
        theirs: np.float32(value) if isinstance(value, float) else value
        for theirs, ours in {**KEYS, **told.keys}.items()
        if (value := values.get(ours)) is not None
    }
    if "head_dim" in values:
        found["attention.value_length"] = values["head_dim"]
    main = next((each for each in (*everywhere, *attention) if isinstance(each.position, Rotary)), None)
    if main is not None and isinstance(main.position, Rotary):
        found["rope.dimension_count"] = main.position.dims or main.head_dim
        found |= _scaling(main.position.scaling)
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in found.items()}


def _sizes(model: Model, said: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers, by the keys of a config.json."""
    stack = model.trunk
    dense = next(_dense(stack.layers), None)
    hidden = dense.hidden if dense else said.get("intermediate_size")
    experts, attention = next(_each(stack, Experts), None), next(_each(stack, Attention), None)
    windows = [mask.before for mask in _each(stack, Window)]
    found: dict[str, Any] = {
        "hidden_size": stack.width,
        "num_hidden_layers": len(stack.layers),
        "intermediate_size": hidden,
        "n_inner": hidden,
        "vocab_size": stack.input.vocab if isinstance(stack.input, Tokens) else None,
        "sliding_window": windows[0] if windows else said.get("sliding_window"),
    }
    if attention is not None:
        found["num_attention_heads"] = attention.heads
        if isinstance(attention.position, Rotary):
            found["num_key_value_heads"] = attention.kv_heads
    if experts is not None:
        found["num_experts"], found["num_experts_per_tok"] = experts.count, experts.top_k
        found["moe_intermediate_size"] = experts.expert.hidden
        if experts.shared_expert is not None:
            found["shared_expert_intermediate_size"] = experts.shared_expert.hidden
    return found


def _dense(part: Any) -> Iterator[Gated | Dense]:
    """Feed-forwards that are no experts."""
    if isinstance(part, tuple):
        for item in part:
            yield from _dense(item)
    elif isinstance(part, Gated | Dense):
        yield part
    elif isinstance(part, Node) and not isinstance(part, Experts):
        for name in fields(part):
            yield from _dense(getattr(part, name.name))


def _numbers(model: Model, told: Architecture) -> dict[str, float | None]:
    """Those that need not be whole."""
    stack, head = model.trunk, model.head
    attention = next(_each(stack, Attention), None)
    found: dict[str, float | None] = {
        "attn_logit_softcapping": attention.score.cap if attention else None,
        "final_logit_softcapping": head.cap if isinstance(head, Language) else None,
    }
    if isinstance(stack.norm, RMSNorm):
        found["rms_norm_eps"] = stack.norm.eps
    if isinstance(stack.norm, LayerNorm):
        found["layer_norm_epsilon"] = stack.norm.eps
    if told.family == "granite" and attention is not None and isinstance(stack.input, Tokens):
        found["embedding_multiplier"] = float(stack.input.scale)
        found["residual_multiplier"] = float(stack.layers[0].sublayers[0].scale)
        found["attention_multiplier"] = attention.score.scale
        found["logits_scaling"] = 1 / head.scale if isinstance(head, Language) else None
    return found


def _rotation(attention: list[Attention], everywhere: list[Attention]) -> dict[str, float]:
    """Bases: of layers that see everything, and of those with a window."""
    main = [part.position.theta for part in everywhere or attention if isinstance(part.position, Rotary)]
    local = [
        part.position.theta
        for part in attention
        if part not in everywhere and isinstance(part.position, Rotary)
    ]
    found = {"rope_theta": float(main[0])} if main else {}
    if local:
        found["rope_local_base_freq"] = float(local[0])
    return found


def _scaling(scaling: Scaling | None) -> dict[str, Any]:
    if isinstance(scaling, Interpolation):
        return {"rope.scaling.type": "linear", "rope.scaling.factor": np.float32(scaling.factor)}
    if isinstance(scaling, Yarn):
        found = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": np.float32(scaling.factor),
            "rope.scaling.original_context_length": scaling.original,
            "rope.scaling.yarn_beta_fast": np.float32(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": np.float32(scaling.beta_slow),
        }
        if scaling.attention_factor is not None:  # llama.cpp multiplies YaRN's own temperature by it
            extra = scaling.attention_factor / mscale(scaling.factor)
            found["rope.scaling.attn_factor"] = np.float32(extra)
        return found
    if isinstance(scaling, LongRope):
        found = {"rope.scaling.original_context_length": scaling.original}
        if scaling.attention_factor is not None:
            found["rope.scaling.attn_factor"] = np.float32(scaling.attention_factor)
        return found
    return {}
