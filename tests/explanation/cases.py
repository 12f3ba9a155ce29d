"""Models and prompts that the methods are held over."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qkv.explanation import Difference, Logit, Reading
from qkv.nn import Taps, Transformer, tap_names
from tests.matrix.variants import BIDIRECTIONAL, ENCODER_DECODERS, VARIANTS, VOCAB
from tests.support import random_model

ALL = VARIANTS | BIDIRECTIONAL | ENCODER_DECODERS
TOKENS = torch.randint(0, VOCAB, (1, 7), generator=torch.Generator().manual_seed(4))
OTHER = torch.randint(0, VOCAB, (1, 7), generator=torch.Generator().manual_seed(5))
REFERENCE = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(6))
SOURCE = torch.randint(0, VOCAB, (1, 4), generator=torch.Generator().manual_seed(7))

DECODERS = [
    "grouped", "biased", "parallel", "parallel-two-norms", "alibi", "shaw", "window", "sink", "cap",
    "post-norm", "deep-norm", "sandwich", "reordered", "scaled-step", "gated-heads", "attention-only",
    "latent", "experts-softmax", "scale-norm", "layer-scale", "gate-in-sandwich", "branches-normed-after",
    "delta-then-attention", "several-ahead", "token-types",
]  # fmt: skip
PAIRS = ["encoder-decoder-post-norm", "encoder-decoder-pre-norm", "encoder-decoder-of-all-parts"]
ENCODERS = ["encoder-with-head", "bidirectional-buckets"]
EVERY = [*DECODERS, *ENCODERS, *PAIRS]

METRIC = Difference(3, against=11)
LOGIT = Logit(3)


@functools.cache
def network(variant: str) -> Transformer:
    return random_model(ALL[variant])


def reading(variant: str, tokens: Tensor = TOKENS) -> Reading:
    """Of a new count, with the model of a variant and a source where it reads one."""
    model = network(variant)
    source = SOURCE.expand(len(tokens), -1) if model.paired else None
    return Reading(model, tokens, source)


def beside(model: Transformer, rows: int = 1) -> dict[str, Tensor]:
    return {"source": SOURCE.expand(rows, -1)} if model.paired else {}


def tapped(variant: str, names: object, tokens: Tensor = TOKENS) -> tuple[Tensor, Taps]:
    """A whole pass of the model itself, with taps: what methods are compared with."""
    model = network(variant)
    taps = Taps(names, tap_names(model.spec))  # type: ignore[arg-type]
    with torch.no_grad():
        return model(tokens, tap=taps, **beside(model, len(tokens))), taps


def asked(logits: Tensor) -> float:
    """METRIC by hand."""
    return float((logits[0, -1, 3] - logits[0, -1, 11]).detach())
