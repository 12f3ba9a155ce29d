"""What a model answers with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.nn.build import build_if, implements


@implements(spec.Language)
class Language(nn.Module):
    """scale * (W transform(x) + b), bounded by cap * tanh(. / cap) where there is a cap."""

    def __init__(self, node: spec.Language, width: int):
        super().__init__()
        self.node = node
        self.transform = build_if(node.transform, width)
        into = node.transform.width if node.transform else width
        self.weight = nn.Parameter(torch.empty(node.vocab, into))
        self.bias = nn.Parameter(torch.empty(node.vocab)) if node.bias else None

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocab"]:
        x = x if self.transform is None else self.transform(x)
        logits = nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if self.node.scale != 1:
            logits = logits * self.node.scale
        if self.node.cap is not None:
            logits = self.node.cap * torch.tanh(logits / self.node.cap)
        return logits
