"""A language model's loss against how long a text it reads: in pieces by themselves, or behind a window."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.claims.training import loss_by_position, mean_loss
from qkv.errors import RequestError
from qkv.nn import Transformer

AT_ONCE = 4096  # tokens of a forward pass


def non_overlapping(network: Transformer, text: Int[Tensor, " corpus"], length: int) -> float:
    """The mean loss, in nats, of a text that is cut into pieces of `length`, each read by itself.

    A longer piece leaves fewer tokens with little before them, so the loss can fall though nothing far
    is used (Press et al. 2022, appendix B). The last piece is left out where it would be shorter.
    """
    starts = torch.arange(0, len(text) - length, length)
    if not len(starts):
        raise RequestError(
            f"The text has {len(text):,} tokens, too few for a piece of {length:,} and its next."
        )
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return mean_loss(network, rows, max(1, AT_ONCE // length))


def sliding(
    network: Transformer, text: Int[Tensor, " corpus"], length: int, longest: int, rows: int, stride: int
) -> float:
    """The mean loss, in nats, of tokens that all have from `length - stride` to `length - 1` before them.

    Windows of `length` end at `rows` places, evenly over the text, and the last `stride` tokens of each
    count: the same ones for every length up to `longest`.
    """
    if len(text) <= longest or not 0 < stride <= length <= longest:
        raise RequestError(
            f"Windows of {length:,} of at most {longest:,} tokens, {stride:,} of which count, do not fit a "
            f"text of {len(text):,}."
        )
    ends = torch.linspace(longest, len(text) - 1, rows).long()
    windows = text[ends[:, None] + torch.arange(-length, 1)]
    return float(loss_by_position(network, windows, max(1, AT_ONCE // length))[-stride:].mean())
