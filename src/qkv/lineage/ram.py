"""Recurrent Models of Visual Attention. Mnih, Heess, Graves, Kavukcuoglu, 2014 (NIPS; arXiv 1406.6247).

A network sees an image through a sensor that is sharp at one place and coarse around it. At each
step it chooses the next place, and after the last it names the class. Choosing is a hard decision
that no gradient passes through: the attention here is learned by REINFORCE, where the soft
attention of the same year (`bahdanau`) is learned by backpropagation.

    sensor (3.1, A)      rho(x, l): k square patches centred at l, each twice as wide as the one
                         before, all averaged down to the size of the first; zeros outside the image
    glimpse (3.1, B)     h_g = relu(Linear rho), h_l = relu(Linear l), g = relu(Linear h_g + Linear h_l)
    core (3.1, C)        h_t = relu(Linear h_{t-1} + Linear g_t); an LSTM in the dynamic task (4.2)
    location             l_t ~ N(Linear h_t, sigma^2 I), sigma fixed
    classifier           softmax(Linear h_T), at the last step alone
    objective (3.2)      cross-entropy, which trains all but the location network; and for that one
                         1/M sum_i sum_t grad log pi(l_t | h_t) (R - b_t), b_t regressed on R

Where the paper is silent, as its reproductions do: the first place is uniform over the image, a
place drawn outside [-1, 1] is moved to the border after its density is taken, and gradients of
REINFORCE and of the baseline stop at h_t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import ConfigError, RequestError

State = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Widths as in all experiments of section 4; the sensor as for centred MNIST."""

    patch: int = 8  # pixels a side of the sharpest patch; 12 for the 60 x 60 and 100 x 100 images
    scales: int = 1  # patches in a glimpse; 3 for the 60 x 60 images, 4 for the 100 x 100 ones
    glimpses: int = 6
    channels: int = 1
    what: int = 128  # h_g
    where: int = 128  # h_l
    glimpse: int = 256  # g
    hidden: int = 256  # h
    classes: int = 10
    deviation: float = 0.15  # sigma, found by search and not printed; reproductions take .11 to .30

    def __post_init__(self) -> None:
        if min(self.patch, self.scales, self.glimpses) < 1:
            raise ConfigError(
                "There is at least one glimpse, of at least one scale and pixel; these hyper-parameters say "
                f"glimpses {self.glimpses}, scales {self.scales}, patch {self.patch}."
            )
        if self.deviation <= 0:
            raise ConfigError(f"Places are drawn with a deviation above 0, not {self.deviation}.")


class Sensor(nn.Module):
    """rho(x, l): what is seen of an image at one place. Figure 1 A.

    A place is (x, y) in [-1, 1]: (0, 0) is the image's centre, (-1, -1) its top left corner,
    (1, 1) its bottom right. Patches are whole pixels, so no gradient reaches the place.
    """

    def __init__(self, patch: int, scales: int):
        super().__init__()
        self.patch = patch
        self.widths = [patch * 2**scale for scale in range(scales)]

    def corners(
        self, places: Float[Tensor, "batch 2"], height: int, width: int
    ) -> Int[Tensor, "batch scales 2"]:
        """The column and row of each patch's top left pixel, which may lie outside the image."""
        centres = (places + 1) / 2 * places.new_tensor([width, height])
        sides = places.new_tensor(self.widths)
        return torch.floor(centres[:, None] - sides[:, None] / 2 + 0.5).long()

    def forward(
        self, images: Float[Tensor, "batch channels height width"], places: Float[Tensor, "batch 2"]
    ) -> Float[Tensor, "batch scales channels patch patch"]:
        corners = self.corners(places, *images.shape[-2:])
        seen = [self.averaged(crop(images, corners[:, i], side)) for i, side in enumerate(self.widths)]
        return torch.stack(seen, 1)

    def averaged(
        self, patches: Float[Tensor, "batch channels side side"]
    ) -> Float[Tensor, "batch channels patch patch"]:
        """Each pixel is the mean of those it stands for: every pixel counts, where a stride would skip."""
        return F.avg_pool2d(patches, patches.shape[-1] // self.patch)


def crop(
    images: Float[Tensor, "batch channels height width"], corners: Int[Tensor, "batch 2"], side: int
) -> Float[Tensor, "batch channels side side"]:
    """Squares with these top left pixels (column, row); zeros where they reach over the image's border."""
    height, width = images.shape[-2:]
    steps = torch.arange(side, device=images.device)
    columns, rows = (corners[:, axis, None] + steps for axis in range(2))
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    pixels = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    slots = pixels.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    found = images.flatten(2).gather(2, slots).unflatten(2, (side, side))
    return found.masked_fill(~inside[:, None], 0)


class Glimpse(nn.Module):
    """g: what is seen and where it was, added before the last rectifier. Figure 1 B, section 4."""

    def __init__(self, sizes: Hyperparameters):
        super().__init__()
        self.sensor = Sensor(sizes.patch, sizes.scales)
        self.what = nn.Linear(sizes.scales * sizes.channels * sizes.patch**2, sizes.what)
        self.where = nn.Linear(2, sizes.where)
        self.from_what = nn.Linear(sizes.what, sizes.glimpse)
        self.from_where = nn.Linear(sizes.where, sizes.glimpse)

    def forward(
        self, images: Float[Tensor, "batch channels height width"], places: Float[Tensor, "batch 2"]
    ) -> Float[Tensor, "batch glimpse"]:
        what = F.relu(self.what(self.sensor(images, places).flatten(1)))
        where = F.relu(self.where(places))
        return F.relu(self.from_what(what) + self.from_where(where))


class Core(Protocol):
    """What remembers. Built as `core(hyperparameters)`; the first tensor of its state is h."""

    def begin(self, glimpse: Float[Tensor, "batch glimpse"]) -> State:
        """The state before the first of these glimpses: zeros."""
        ...

    def __call__(self, glimpse: Float[Tensor, "batch glimpse"], state: State) -> State: ...


class Rectified(nn.Module):
    """h_t = relu(Linear h_{t-1} + Linear g_t): the core of the classification tasks. Section 4."""

    def __init__(self, sizes: Hyperparameters):
        super().__init__()
        self.from_hidden = nn.Linear(sizes.hidden, sizes.hidden)
        self.from_glimpse = nn.Linear(sizes.glimpse, sizes.hidden)

    def begin(self, glimpse: Tensor) -> State:
        return (glimpse.new_zeros(len(glimpse), self.from_hidden.in_features),)

    def forward(self, glimpse: Tensor, state: State) -> State:
        return (F.relu(self.from_hidden(state[0]) + self.from_glimpse(glimpse)),)


class Lstm(nn.Module):
    """An LSTM as the core: the dynamic task of section 4.2, whose image changes from step to step."""

    def __init__(self, sizes: Hyperparameters):
        super().__init__()
        self.cell = nn.LSTMCell(sizes.glimpse, sizes.hidden)

    def begin(self, glimpse: Tensor) -> State:
        zeros = glimpse.new_zeros(len(glimpse), self.cell.hidden_size)
        return zeros, zeros

    def forward(self, glimpse: Tensor, state: State) -> State:
        hidden, memory = self.cell(glimpse, state)
        return hidden, memory


class Choice(NamedTuple):
    """A place, and how probable it was to choose it."""

    place: Float[Tensor, "batch 2"]  # in [-1, 1], without gradient
    log_probability: Float[Tensor, " batch"]  # its gradient is the policy's


class Policy(Protocol):
    """Where to look next. Built as `policy(hyperparameters)`; any module of this form may replace it."""

    def __call__(
        self, hidden: Float[Tensor, "batch hidden"], generator: torch.Generator | None = None
    ) -> Choice: ...


class Gaussian(nn.Module):
    """The location network: l ~ N(Linear h, sigma^2 I). Section 4."""

    def __init__(self, sizes: Hyperparameters):
        super().__init__()
        self.mean = nn.Linear(sizes.hidden, 2)
        self.deviation = sizes.deviation

    def forward(self, hidden: Tensor, generator: torch.Generator | None = None) -> Choice:
        mean = self.mean(hidden)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        # a constant from here on: the density's gradient is (l - mean) / sigma^2 only if l does not move too
        drawn = (mean + self.deviation * noise).detach()
        return Choice(drawn.clamp(-1, 1), log_density(drawn, mean, self.deviation))


class Uniform(nn.Module):
    """Random places: what learned ones are measured against. It has nothing to learn. Section 4.1."""

    def __init__(self, sizes: Hyperparameters | None = None):
        super().__init__()

    def forward(self, hidden: Tensor, generator: torch.Generator | None = None) -> Choice:
        drawn = torch.rand(len(hidden), 2, generator=generator, device=hidden.device, dtype=hidden.dtype)
        return Choice(2 * drawn - 1, hidden.new_full((len(hidden),), -2 * math.log(2)))


def log_density(
    drawn: Float[Tensor, "*batch axes"], mean: Float[Tensor, "*batch axes"], deviation: float
) -> Float[Tensor, "*batch"]:
    """Of a Gaussian with the same deviation along every axis."""
    squares = ((drawn - mean) / deviation).square().sum(-1)
    return -squares / 2 - drawn.shape[-1] * math.log(deviation * math.sqrt(2 * math.pi))


class Episode(NamedTuple):
    """What happened over the glimpses of a batch, in independent samples.

    The path of glimpses is `places`; `Sensor.corners` says which pixels were seen there. The first
    place is given and the last is followed by the answer, so there is one decision fewer.
    """

    logits: Float[Tensor, "samples batch classes"]
    places: Float[Tensor, "samples batch glimpses 2"]
    log_probabilities: Float[Tensor, "samples batch decisions"]
    baselines: Float[Tensor, "samples batch decisions"]


class RecurrentAttention(nn.Module):
    """The recurrent attention model, RAM. Figure 1 C.

    `forward` plays whole episodes on still images. In a game whose image changes, call `look` once
    a step with the image of that step: `policy` and `classifier`, given h, are then the next place
    and the next action.
    """

    def __init__(
        self,
        sizes: Hyperparameters = Hyperparameters(),
        core: Callable[[Hyperparameters], Core] = Rectified,
        policy: Callable[[Hyperparameters], Policy] = Gaussian,
    ):
        super().__init__()
        self.sizes = sizes
        self.glimpse = Glimpse(sizes)
        self.core = core(sizes)
        self.policy = policy(sizes)
        self.baseline = nn.Linear(sizes.hidden, 1)
        self.classifier = nn.Linear(sizes.hidden, sizes.classes)

    def reset_parameters(self) -> None:
        """The paper states no initialisation: each map has its own, U(-1/sqrt(inputs), 1/sqrt(inputs))."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LSTMCell):
                module.reset_parameters()

    def look(
        self,
        images: Float[Tensor, "batch channels height width"],
        places: Float[Tensor, "batch 2"],
        state: State | None = None,
    ) -> State:
        """One glimpse at each image; the state after it, whose first tensor is h (batch, hidden)."""
        glimpse = self.glimpse(images, places)
        return self.core(glimpse, self.core.begin(glimpse) if state is None else state)

    def forward(
        self,
        images: Float[Tensor, "batch channels height width"],
        samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Episode:
        """Episodes over each image, `samples` of them side by side: M of section 3.2."""
        self._check(images, samples)
        batch = len(images)
        images = images.repeat(samples, 1, 1, 1)
        place = Uniform()(images.flatten(1), generator).place
        places, log_probabilities, baselines = [place], [], []
        state = self.look(images, place)
        for _ in range(self.sizes.glimpses - 1):
            hidden = state[0].detach()  # core and glimpses learn to recognise, not to choose
            choice = self.policy(hidden, generator)
            places.append(choice.place)
            log_probabilities.append(choice.log_probability)
            baselines.append(self.baseline(hidden)[:, 0])
            state = self.look(images, choice.place, state)
        none = images.new_zeros(len(images), 0)
        parts = (
            self.classifier(state[0]),
            torch.stack(places, 1),
            torch.stack(log_probabilities, 1) if log_probabilities else none,
            torch.stack(baselines, 1) if baselines else none,
        )
        return Episode(*(part.unflatten(0, (samples, batch)) for part in parts))

    @torch.no_grad()
    def predict(
        self,
        images: Float[Tensor, "batch channels height width"],
        samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch classes"]:
        """Probabilities of the classes: the mean over as many paths of glimpses, a Monte Carlo estimate."""
        return self(images, samples, generator).logits.softmax(-1).mean(0)

    def _check(self, images: Tensor, samples: int) -> None:
        if images.ndim != 4 or images.shape[1] != self.sizes.channels:
            raise RequestError(
                f"Images are (batch, {self.sizes.channels}, height, width), not {tuple(images.shape)}."
            )
        if samples < 1:
            raise RequestError(f"An estimate needs at least one sample, not {samples}.")


class Losses(NamedTuple):
    """The three parts of the hybrid objective, each a mean over samples and batch. Section 3.2."""

    classification: Float[Tensor, ""]  # trains glimpses, core and classifier
    reinforce: Float[Tensor, ""]  # trains the policy; its value means nothing, its gradient does
    baseline: Float[Tensor, ""]  # trains the baseline

    @property
    def total(self) -> Float[Tensor, ""]:
        """Their sum. No two reach the same parameters, so weighing them is a matter of learning rates."""
        return self.classification + self.reinforce + self.baseline


def losses(episode: Episode, labels: Int[Tensor, " batch"]) -> Losses:
    """The reward is 1 for the right class at the end, else 0: every decision's return. Section 3.2."""
    logits = episode.logits.flatten(0, 1)
    answers = labels.expand(len(episode.logits), -1)
    rewards = (episode.logits.argmax(-1) == answers).to(logits.dtype)[..., None]
    return Losses(
        F.cross_entropy(logits, answers.flatten()),
        policy_loss(episode.log_probabilities, rewards, episode.baselines),
        (episode.baselines - rewards).square().sum(-1).mean(),
    )


def policy_loss(
    log_probabilities: Float[Tensor, "*batch decisions"],
    returns: Float[Tensor, "*batch #decisions"],
    baselines: Float[Tensor, "*batch decisions"],
) -> Float[Tensor, ""]:
    """REINFORCE: descending it ascends the expected return. Williams 1992; equation 2 of section 3.2.

    A baseline changes the variance alone: the policy learns nothing from it, nor it from the policy.
    """
    advantages = (returns - baselines).detach()
    return -(log_probabilities * advantages).sum(-1).mean()
