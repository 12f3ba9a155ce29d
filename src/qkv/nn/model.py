"""The model: stacks, and the head that reads the last of them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import CapacityError, RequestError, UnsupportedError
from qkv.nn import attention, feed_forward, inputs, layers, norms, positions  # noqa: F401  (they register)
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.layout import Layout
from qkv.nn.taps import NoTap, Tap


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


class Transformer(nn.Module):
    """The reference model of a description. Parameters carry the description's names."""

    def __init__(self, node: spec.Model):
        super().__init__()
        if node.towers or node.encoder is not None or node.decoder is None:
            raise UnsupportedError("Only decoders can be run in torch yet.")
        self.spec = node
        self.decoder = build(node.decoder)
        self.head = build_if(node.head, node.trunk.width)
        tie(self, node)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        *,
        layout: Layout | None = None,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
        last_only: bool = False,
    ) -> Float[Tensor, "batch length vocab"] | Float[Tensor, "batch length width"]:
        """Logits where the model has a language head, else hidden states.

        `layout` defaults to unpadded rows. With a cache, the tokens follow those it holds; after an
        error it is as before. `last_only` gives the last place of each row only.
        """
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise RequestError(f"Tokens must be (batch, length), both at least 1; got {tuple(tokens.shape)}.")
        layout = layout or Layout.unpadded(tokens.shape[0], tokens.shape[1], tokens.device)
        layout.check(tuple(tokens.shape))
        held = cache.length if cache is not None else 0
        try:
            seen = layout if cache is None else cache.extend(layout)
            states = self.decoder(tokens, seen, cache, tap)
            if self.head is None:
                return states
            return tap("logits", self.head(states[:, -1:] if last_only else states))
        except BaseException as problem:
            if cache is not None:
                cache.truncate(held)
            if _out_of_memory(problem):
                batch, length = tokens.shape
                raise CapacityError(
                    f"There is no memory for a pass over {length:,} tokens in {batch:,} rows; give it fewer."
                ) from None
            raise


def _out_of_memory(problem: BaseException) -> bool:
    """Torch's processor allocator has no error class of its own."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(problem, kinds) or (
        isinstance(problem, RuntimeError) and "allocate memory" in str(problem)
    )


def tie(module: nn.Module, node: spec.Model) -> None:
    """Makes parameters that the description shares one and the same."""
    first: dict[str, nn.Parameter] = {}
    for tensor in node.tensors():
        owner, _, leaf = tensor.name.rpartition(".")
        parameter = first.setdefault(tensor.key, module.get_parameter(tensor.name))
        setattr(module.get_submodule(owner), leaf, parameter)
