"""From a router's logits to experts and what they weigh, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qkv.runtime.activations import sigmoid
from qkv.spec import Router

Floats = NDArray[np.float32]


def routed(
    logits: Floats, router: Router, top_k: int, balance: Floats | None
) -> tuple[NDArray[np.intp], Floats]:
    """The experts of each row, in their order, and their weights: (rows, top_k) each.

    Groups: DeepSeek-V2, section 2.2; a bias that takes part in choosing alone: DeepSeek-V3, section 2.1.2.
    """
    scores = _softmax(logits) if router.score == "softmax" else sigmoid(logits)
    # in the order of the logits, which round to ties less often
    ranking = (
        logits if balance is None and router.groups == 1 else scores + (0 if balance is None else balance)
    )
    if router.groups > 1:
        ranking = np.where(_eligible(ranking, router), ranking, -np.inf)
    chosen = np.sort(_best(ranking, top_k), 1)
    weights = np.take_along_axis(scores, chosen, 1)
    if router.normalise:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), np.float32(1e-20))
    return chosen, (np.float32(router.scale) * weights).astype(np.float32)


def _softmax(logits: Floats) -> Floats:
    shares = np.exp(logits - logits.max(1, keepdims=True))
    found: Floats = shares / shares.sum(1, keepdims=True)
    return found


def _best(ranking: Floats, count: int) -> NDArray[np.intp]:
    """The places of the highest of each row; of equals, those that stand first."""
    return np.argsort(-ranking, axis=1, kind="stable")[:, :count]


def _eligible(ranking: Floats, router: Router) -> NDArray[np.bool_]:
    """The experts of each row's best groups."""
    grouped = ranking.reshape(len(ranking), router.groups, -1)
    merit = np.sort(grouped, -1)[..., -router.group_best :].sum(-1)
    groups = np.zeros(merit.shape, bool)
    np.put_along_axis(groups, _best(merit, router.top_groups), True, 1)
    return np.repeat(groups, grouped.shape[-1], 1)
