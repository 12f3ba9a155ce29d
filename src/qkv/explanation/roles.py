"""What a head looks at, as numbers: functions of attention weights and of the tokens they are over.

Weights are (batch, heads, query, key), as the taps `layers.*.attention.weights` give them, of unpadded
rows read from their beginning; tokens (batch, length). Every score is one number a head, (heads,), the
mean over the queries of all rows that it is about: a share of the attention, from 0 to 1, or a distance
in tokens. What a score means shows beside that of `equal`, attention that tells no key from another.

Previous and next token, separators, first token: Clark et al. 2019, section 3; Voita et al. 2019, section 5.
Prefix matching: Olsson et al. 2022, "In-context Learning and Induction Heads".
Distance: Vig and Belinkov 2019, "Analyzing the Structure of Attention in a Transformer Language Model".
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.errors import RequestError

Weights = Float[Tensor, "batch heads query key"]
Tokens = Int[Tensor, "batch length"]
Scores = Float[Tensor, " heads"]


def previous_token(weights: Weights) -> Scores:
    """The share on the token just before the query, of all queries that have one."""
    _check(weights)
    return weights.diagonal(-1, -2, -1).float().mean((0, -1))


def next_token(weights: Weights) -> Scores:
    """The share on the token just after the query, of all queries that have one: 0 of causal attention."""
    _check(weights)
    return weights.diagonal(1, -2, -1).float().mean((0, -1))


def first_token(weights: Weights) -> Scores:
    """The share on the row's first token, of all queries after it. Xiao et al. 2024: a sink where large."""
    _check(weights)
    return weights[..., 1:, 0].float().mean((0, -1))


def on_tokens(weights: Weights, tokens: Tokens, kinds: Int[Tensor, " kinds"]) -> Scores:
    """The share on tokens of these kinds (separators, say), the query's own place included.

    Of all queries; where the model is causal and none came yet, a query gives 0.
    Raises RequestError where no row has such a token.
    """
    _check(weights, tokens)
    wanted = torch.isin(tokens, kinds)
    if not wanted.any():
        raise RequestError("None of these rows has a token of these kinds, so no head can look at one.")
    return (weights.float() * wanted[:, None, None]).sum(-1).mean((0, -1))


def duplicate(weights: Weights, tokens: Tokens) -> Scores:
    """The share on earlier places of the query's own token, of all queries that have one.

    Raises RequestError where no token comes twice in a row.
    """
    _check(weights, tokens)
    return _share(weights, _same(tokens).tril(-1), "No token comes twice in any of these rows.")


def prefix_matching(weights: Weights, tokens: Tokens) -> Scores:
    """The share on what followed earlier places of the query's own token: high for an induction head.

    Of all queries that have such a key before them; the query's own place is none. Olsson et al. 2022
    measure it on random tokens that are repeated, where nothing else draws attention there.
    Raises RequestError where no query has such a key.
    """
    _check(weights, tokens)
    same = _same(tokens)
    followed = torch.zeros_like(same)
    followed[..., 1:] = same[..., :-1]  # a key counts where the key before it is the query's token
    return _share(weights, followed.tril(-1), "No token of these rows comes again after what followed it.")


def distance(weights: Weights) -> Float[Tensor, " heads"]:
    """How many tokens away attention looks: sum of weight * |query - key| / sum of weight.

    Weights that don't sum to 1 are taken as they are, so `distance(weights[..., 1:, 1:])` leaves the
    first token out, which many heads look at from everywhere when they look at nothing.
    """
    _check(weights)
    places = torch.arange(weights.shape[-1], device=weights.device)
    away = (places[:, None] - places).abs()
    total = weights.double().sum((0, 2, 3))
    return ((weights.double() * away).sum((0, 2, 3)) / total).float()


def equal(length: int) -> Float[Tensor, "1 1 length length"]:
    """Causal attention that gives every key the same: the scores of a head that does not choose."""
    seen = torch.ones(length, length).tril()
    return (seen / seen.sum(-1, keepdim=True))[None, None]


def _same(tokens: Tokens) -> Bool[Tensor, "batch length length"]:
    return tokens[:, :, None] == tokens[:, None, :]


def _share(weights: Weights, wanted: Bool[Tensor, "batch query key"], none: str) -> Scores:
    """The mean weight on the wanted keys, over the queries that have any."""
    having = wanted.any(-1)
    if not having.any():
        raise RequestError(none)
    shares = (weights.float() * wanted[:, None]).sum(-1)
    return (shares * having[:, None]).sum((0, -1)) / having.sum()


def _check(weights: Tensor, tokens: Tensor | None = None) -> None:
    shape = tuple(weights.shape)
    if len(shape) != 4 or shape[-1] != shape[-2] or shape[-1] < 2:
        raise RequestError(
            f"Weights have shape {shape}; they must be (batch, heads, query, key), as many queries as keys, "
            "at least two."
        )
    if tokens is None:
        return
    rows = shape[0] if shape[0] > 1 else len(tokens)  # weights of one row, such as `equal`'s, hold for all
    if tuple(tokens.shape) != (rows, shape[-1]):
        raise RequestError(
            f"Tokens have shape {tuple(tokens.shape)}; for these weights it must be {(rows, shape[-1])}."
        )
