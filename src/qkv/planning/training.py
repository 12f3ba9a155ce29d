"""What training takes: weights, gradients, the optimiser's moments, and activations for the way back."""

from __future__ import annotations

from qkv.planning.sizes import Part
from qkv.planning.workspace import vocabulary
from qkv.spec import Model
from qkv.spec.attention import Attention, CrossAttention
from qkv.spec.feed_forward import Experts, Gated
from qkv.spec.layers import Layer


def training(model: Model, batch: int, length: int, checkpointing: bool = False) -> tuple[Part, ...]:
    """AdamW in mixed precision: 16 bytes a parameter (Rajbhandari et al. 2020, section 3.1); activations.

    Kept for the way back, in 16 bits: what each product, norm and activation reads (Korthikanti et al.
    2022, section 4, with fused attention, which keeps no scores). With `checkpointing` only each
    layer's input is kept, and one layer's activations at a time.
    """
    count, tokens = model.parameters(), batch * length
    parts = [
        Part("weights", 2 * count, f"{count:,} parameters in 16 bits"),
        Part("gradients", 2 * count, f"{count:,} in 16 bits"),
        Part("optimiser", 12 * count, f"{count:,} x (fp32 weights, first and second moments)"),
    ]
    layers = [2 * tokens * _kept(layer, model.trunk.width) for layer in model.trunk.layers]
    each = f"{batch:,} x {length:,} tokens"
    if checkpointing:
        total = 2 * tokens * model.trunk.width * len(layers) + max(layers, default=0)
        formula = f"{each}: the inputs of {len(layers)} layers, and one layer's activations"
    else:
        total, formula = sum(layers), f"{each} x {sum(layers) // max(1, 2 * tokens):,} numbers in 16 bits"
    parts.append(Part("activations", total, formula, band=0.3))
    vocab = vocabulary(model)
    # fp32, with their gradient
    parts.append(Part("logits", 8 * tokens * vocab, f"{each} x {vocab:,} in fp32, and their gradient", 0.5))
    return tuple(parts)


def _kept(layer: Layer, width: int) -> int:
    """Numbers of one token that the way back needs."""
    total = 0
    for _, mixer in layer.mixers():
        total += 2 * width  # into the norm, and out of it into the products
        if isinstance(mixer, Attention | CrossAttention):
            value = mixer.value_dim or mixer.head_dim
            total += mixer.heads * (mixer.head_dim + value) + mixer.kv_heads * (mixer.head_dim + value)
        elif isinstance(mixer, Experts):
            total += mixer.top_k * (3 if isinstance(mixer.expert, Gated) else 2) * mixer.expert.hidden
        else:
            total += (3 if isinstance(mixer, Gated) else 2) * getattr(mixer, "hidden", 2 * width)
    return total
