"""Feed-forwards as memories: what their units write, and how one of them is rewritten.

W_down f(W_up x) reads each hidden unit as a key's match times a value, a column of W_down: Geva et al.
2021, section 2. A rank-one edit puts one value at one key: Meng et al. 2022 (ROME), section 3.1.
Editing well does not show that the fact was stored there (Hase et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError
from qkv.explanation.lens import folded, readout
from qkv.explanation.metric import Difference, Metric
from qkv.explanation.parts import feed_forward
from qkv.explanation.reading import Place, Reading
from qkv.explanation.result import Axis, Evidence
from qkv.nn.linear import Linear


def memories(reading: Reading, layer: int, place: int = -1) -> Evidence:
    """How much each hidden unit of a layer writes at a token: its activation times its value's length.

    Axis (neuron), signed as the activation is. Geva et al. 2022, section 5.
    """
    key = key_at(reading, layer, place)
    lengths = down(reading, layer).weight.detach().double().norm(dim=0)
    values = (key * lengths).cpu().numpy()
    axis = Axis("neuron", tuple(range(len(values))))
    return Evidence("feed-forward memories", values, (axis,), "activation times length of the value")


def neuron_readout(reading: Reading, layer: int, neurons: Sequence[int]) -> Evidence:
    """What the head reads in the values of hidden units: what an activation of one adds to each logit.

    Axes (neuron, answer). With the last norm's scale and without its bias and what it divides by, so
    that answers of one value compare with one another and lengths with nothing. Geva et al. 2022,
    section 3. Raises UnsupportedError for heads that are not linear.
    """
    side, node = reading.sides[-1], reading.spec.head
    read = folded(side.stack.norm, readout(reading.network.head))
    columns = down(reading, layer).weight.detach().double()
    for neuron in neurons:
        if not 0 <= neuron < columns.shape[1]:
            raise RequestError(f"Layer {layer} has no neuron {neuron}: it has {columns.shape[1]:,}.")
    values = (columns[:, list(neurons)].T @ read.weight.T).float().cpu().numpy()
    named = isinstance(node, spec.Language | spec.MultiToken)
    answers = tuple(reading.label(i) if named else i for i in range(values.shape[1]))
    axes = (Axis("neuron", tuple(neurons)), Axis("answer", answers))
    return Evidence("feed-forward values", values, axes, "logit an activation adds, up to the last norm")


def down(reading: Reading, layer: int) -> Linear:
    """The map whose columns are the values, (width, hidden). Of the trunk's feed-forward."""
    site, _ = feed_forward(reading, layer)
    module = reading.sides[site.side].stack.layers[layer].get_submodule(site.name)
    return cast(Linear, module.get_submodule("down"))


def key_at(reading: Reading, layer: int, place: int = -1) -> Float[Tensor, " hidden"]:
    """What a layer's feed-forward looks up at a token: its hidden units, float64."""
    site, _ = feed_forward(reading, layer)
    point = site.point(reading, "hidden")
    return reading.one().read([point])[point][0, _place(reading, place)].double()


def value_at(reading: Reading, layer: int, place: int = -1) -> Float[Tensor, " width"]:
    """What it finds: W k, without the bias, float64."""
    return down(reading, layer).weight.detach().double() @ key_at(reading, layer, place)


def key_moment(reference: Reading, layer: int) -> Float[Tensor, "hidden hidden"]:
    """C = E[k k^T] over all tokens of a reference, float64. Not centred."""
    site, _ = feed_forward(reference, layer)
    point = site.point(reference, "hidden")
    keys = reference.read([point])[point].flatten(0, 1).double()
    return keys.T @ keys / len(keys)


def rank_one(
    weight: Float[Tensor, "width hidden"],
    key: Float[Tensor, " hidden"],
    value: Float[Tensor, " width"],
    moment: Float[Tensor, "hidden hidden"],
) -> Float[Tensor, "width hidden"]:
    """W' = W + (v - W k) (C^-1 k)^T / (k^T C^-1 k): W' k = v, and W' x = W x wherever x^T C^-1 k = 0.

    Of all W' with W' k = v the one that changes least what the keys of C are mapped to. Meng et al.
    2022, equation 2. Computed in float64 and given in the weight's type, which is where v is exact up to
    its rounding. Raises RequestError where C has no inverse: it needs more tokens than hidden units.
    """
    wide, key, value = weight.detach().double(), key.double(), value.double()
    factor, failed = torch.linalg.cholesky_ex(moment.double())
    if int(failed) or float(factor.diagonal().min() / factor.diagonal().max()) < 1e-7:
        raise RequestError(
            "The keys' moments have no inverse: take them over more tokens than the "
            f"{len(key):,} hidden units, or add a little to their diagonal."
        )
    direction = torch.cholesky_solve(key[:, None], factor)[:, 0]
    length = float(direction @ key)
    if length <= 0:
        raise RequestError("The key is zero, and nothing can be stored there.")
    changed = wide + torch.outer((value - wide @ key) / length, direction)
    return changed.to(weight.dtype)


def target_value(
    reading: Reading,
    layer: int,
    metric: Metric,
    place: int = -1,
    steps: int = 25,
    rate: float = 0.5,
    decay: float = 0.1,
) -> Float[Tensor, " width"]:
    """A value that raises the metric when the layer's feed-forward finds it at a token, float64.

    Adam on what is added to the value, from nothing, with `decay` times its squared length over that of
    the value. Meng et al. 2022, equation 4, without the term that holds the subject's other answers.
    """
    site, _ = feed_forward(reading, layer)
    there, own = _place(reading.one(), place), value_at(reading, layer, place)
    more = torch.zeros_like(own, dtype=reading.state(Place(site.side, layer)).dtype).requires_grad_()

    def put(value: Tensor) -> Tensor:
        value = value.clone()
        value[:, there] = value[:, there] + more
        return value

    optimiser = torch.optim.Adam([more], lr=rate)
    places, size = reading.places(metric), float(own.square().sum())
    taps = reading.taps({site.point(reading, "output"): put})
    for _ in range(steps):
        answer = reading.run(taps, start=Place(site.side, layer), places=places)
        loss = -metric(answer).sum() + decay * more.square().sum() / max(size, 1e-12)
        (more.grad,) = torch.autograd.grad(loss, [more])
        optimiser.step()
    return own + more.detach().double()


@contextmanager
def edited(reading: Reading, layer: int, weight: Float[Tensor, "width hidden"]) -> Iterator[None]:
    """While the block runs the layer's values are these, and so are those of layers that share them.

    Readings made before the block keep states from before: make new ones inside.
    """
    linear = down(reading, layer)
    if weight.shape != linear.weight.shape:
        got, must = tuple(weight.shape), tuple(linear.weight.shape)
        raise RequestError(f"The values have shape {got}; they must be {must}.")
    before = linear.weight
    after = nn.Parameter(weight.to(before), requires_grad=before.requires_grad)
    owners = [
        (module, name)
        for module in reading.network.modules()
        for name, parameter in module._parameters.items()
        if parameter is before
    ]
    _put(owners, after)
    try:
        yield
    finally:
        _put(owners, before)


@dataclass(frozen=True)
class EditScores:
    """Shares of prompts, 0 to 1, that answer as they should after an edit. Meng et al. 2022, section 3.3.

    `efficacy`: of the edited prompts, and `paraphrase`: of the same asked in other words, those that
    prefer the new answer; `specificity`: of prompts about others, those that still prefer the old.
    NaN where there is no such prompt.
    """

    efficacy: float
    paraphrase: float
    specificity: float


class Asked(NamedTuple):
    """Prompts of the three kinds, each as a `Reading` takes it."""

    edited: Iterable[Sequence[int] | str]
    paraphrases: Iterable[Sequence[int] | str] = ()
    others: Iterable[Sequence[int] | str] = ()


def edit_scores(reading: Reading, asked: Asked, new: int, old: int) -> EditScores:
    """How the model as it is now answers at the last token of each prompt: by the logits of both tokens."""

    def preferring(prompts: Iterable[Sequence[int] | str]) -> np.ndarray:
        metric = Difference(new, old)
        return np.array([float(Reading(reading.model, prompt).value(metric)) for prompt in prompts])

    kinds = [preferring(prompts) for prompts in asked]
    shares = [kinds[0] > 0, kinds[1] > 0, kinds[2] < 0]
    return EditScores(*(float(share.mean()) if len(share) else float("nan") for share in shares))


def _put(owners: Iterable[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    """In every module that shares it."""
    for module, name in owners:
        setattr(module, name, parameter)


def _place(reading: Reading, place: int) -> int:
    if not -reading.length() <= place < reading.length():
        raise RequestError(f"There is no place {place} in a prompt of {reading.length():,} tokens.")
    return place % reading.length()
