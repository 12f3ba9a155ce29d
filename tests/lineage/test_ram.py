"""The recurrent attention model: what its sensor sees, how it chooses, what each part of its loss trains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import ConfigError, RequestError
from qkv.lineage import ram
from qkv.lineage.ram import Choice, Gaussian, Hyperparameters, Lstm, RecurrentAttention, Sensor, Uniform
from tests.support import assert_close

SMALL = Hyperparameters(
    patch=4, scales=2, glimpses=4, channels=2, what=8, where=6, glimpse=10, hidden=12, classes=5
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(sizes: Hyperparameters = SMALL, **slots: object) -> RecurrentAttention:
    torch.manual_seed(0)
    return RecurrentAttention(sizes, **slots)


def images(batch: int = 3, channels: int = 2, height: int = 20, width: int = 16) -> Tensor:
    return torch.rand(batch, channels, height, width, generator=draws())


def at(*places: tuple[float, float]) -> Tensor:
    return torch.tensor(places)


def trained(network: RecurrentAttention, loss: Tensor) -> set[str]:
    """The parts that this loss alone would change."""
    network.zero_grad()
    loss.backward()
    reached = {
        name for name, p in network.named_parameters() if p.grad is not None and bool((p.grad != 0).any())
    }
    return {name.split(".")[0] for name in reached}


# The sensor


def test_the_sharpest_patch_at_the_centre_is_the_central_crop() -> None:
    picture = images()
    seen = Sensor(8, 1)(picture, torch.zeros(3, 2))
    assert torch.equal(seen[:, 0], picture[:, :, 6:14, 4:12])


def test_places_run_from_the_top_left_to_the_bottom_right_x_first() -> None:
    picture = torch.arange(20.0 * 16).view(1, 1, 20, 16).expand(3, -1, -1, -1)
    places = at((-0.5, -0.5), (0.5, -0.5), (-0.5, 0.5))
    seen = Sensor(2, 1)(picture, places)[:, 0, 0]
    for patch, row, column in zip(seen, (5, 5, 15), (4, 12, 4), strict=True):
        assert torch.equal(patch, picture[0, 0, row - 1 : row + 1, column - 1 : column + 1])


def test_outside_the_image_there_are_zeros() -> None:
    """At the corners three quarters of a patch lie outside; the paper pads, it does not move the patch."""
    ones = torch.ones(2, 1, 20, 16)
    top_left, bottom_right = Sensor(4, 1)(ones, at((-1, -1), (1, 1)))[:, 0, 0]
    quarter = torch.zeros(4, 4)
    quarter[2:, 2:] = 1
    assert torch.equal(top_left, quarter)
    assert torch.equal(bottom_right, quarter.flip(0, 1))


def test_a_patch_wider_than_the_image_has_it_in_the_middle() -> None:
    seen = Sensor(8, 3)(torch.ones(1, 1, 16, 16), torch.zeros(1, 2))
    assert seen.mean((2, 3, 4)).tolist() == [[1, 1, 0.25]]


def test_each_patch_is_twice_as_wide_and_averaged_down() -> None:
    picture = images(1)
    seen = Sensor(4, 3)(picture, torch.zeros(1, 2))
    assert seen.shape == (1, 3, 2, 4, 4)
    for scale, side in enumerate((1, 2, 4)):
        crop = picture[0, :, 10 - 2 * side : 10 + 2 * side, 8 - 2 * side : 8 + 2 * side]
        blocks = [
            [crop[:, side * i : side * (i + 1), side * j : side * (j + 1)].mean((1, 2)) for j in range(4)]
            for i in range(4)
        ]
        expected = torch.stack([torch.stack(row, -1) for row in blocks], -2)
        assert_close(seen[0, scale], expected)


def test_resizing_averages_and_does_not_skip_pixels() -> None:
    """Every second pixel of a checkerboard has one colour: a stride would see that colour alone."""
    board = (torch.arange(16)[:, None] + torch.arange(16)) % 2
    seen = Sensor(4, 2)(board.float()[None, None], torch.zeros(1, 2))
    assert torch.equal(seen[0, 1, 0], torch.full((4, 4), 0.5))


def test_pixels_outside_all_patches_do_not_change_what_is_seen() -> None:
    sensor, picture, place = Sensor(4, 2), images(1, 1, 40, 40), at((0.3, -0.4))
    column, row = sensor.corners(place, 40, 40)[0, -1].tolist()
    other = torch.full_like(picture, float("inf"))
    window = (..., slice(row, row + 8), slice(column, column + 8))
    other[window] = picture[window]
    assert torch.equal(sensor(other, place), sensor(picture, place))
    for pixel in ((row, column), (row + 7, column + 7)):  # and each corner of the window does
        changed = picture.clone()
        changed[0, 0, *pixel] += 1
        assert not torch.equal(sensor(changed, place), sensor(picture, place))


def test_the_corners_say_where_the_patches_were() -> None:
    corners = Sensor(4, 2).corners(at((0, 0), (-1, 1)), 20, 16)
    assert corners.tolist() == [[[6, 8], [4, 6]], [[-2, 18], [-4, 16]]]


def test_what_is_seen_has_no_gradient_by_its_place() -> None:
    """The attention is hard: a step within a pixel changes nothing, so only REINFORCE can move it."""
    place = at((0.1, 0.1)).requires_grad_()
    seen = Sensor(4, 2)(images(1), place)
    assert not seen.requires_grad
    assert torch.equal(seen, Sensor(4, 2)(images(1), place.detach() + 1e-3))


# The parts


def test_the_glimpse_adds_what_and_where_before_the_last_rectifier() -> None:
    network, picture, places = model().glimpse, images(), at((0, 0), (0.5, -1), (-0.2, 0.9))
    rho = network.sensor(picture, places).flatten(1).double()
    w = {name: p.detach().double() for name, p in network.named_parameters()}
    what = (rho @ w["what.weight"].T + w["what.bias"]).clamp(min=0)
    where = (places.double() @ w["where.weight"].T + w["where.bias"]).clamp(min=0)
    summed = (
        what @ w["from_what.weight"].T
        + w["from_what.bias"]
        + where @ w["from_where.weight"].T
        + w["from_where.bias"]
    )
    assert_close(network(picture, places), summed.clamp(min=0))


def test_the_core_is_a_rectified_recurrence() -> None:
    core, glimpse, before = ram.Rectified(SMALL), torch.randn(3, 10), torch.randn(3, 12)
    (hidden,) = core(glimpse, (before,))
    inputs = torch.cat([before, glimpse], 1)
    weight = torch.cat([core.from_hidden.weight, core.from_glimpse.weight], 1)
    expected = (inputs @ weight.T + core.from_hidden.bias + core.from_glimpse.bias).clamp(min=0)
    assert_close(hidden, expected)
    assert torch.equal(core.begin(glimpse)[0], torch.zeros(3, 12))


def test_the_other_core_is_an_lstm_in_a_game_whose_image_changes() -> None:
    network = model(core=Lstm)
    frames, places = torch.rand(5, 3, 2, 20, 16), torch.rand(5, 3, 2) * 2 - 1
    state = None
    for frame, place in zip(frames, places, strict=True):
        state = network.look(frame, place, state)
    assert state is not None
    reference = nn.LSTM(10, 12)
    cell = network.core.cell
    reference.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    seen = torch.stack([network.glimpse(f, p) for f, p in zip(frames, places, strict=True)])
    hidden = reference(seen)[0][-1]
    assert_close(state[0], hidden)
    assert network.classifier(state[0]).shape == (3, 5)


def test_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        network = RecurrentAttention()
    glimpse = (64 * 128 + 128) + (2 * 128 + 128) + 2 * (128 * 256 + 256)
    core = 2 * (256 * 256 + 256)
    heads = (256 * 2 + 2) + (256 + 1) + (256 * 10 + 10)
    assert sum(p.numel() for p in network.parameters()) == glimpse + core + heads == 209_677


# The policy


def test_a_place_is_drawn_around_the_location_network() -> None:
    policy = Gaussian(Hyperparameters(hidden=12, deviation=0.11))
    hidden = 0.1 * torch.randn(1, 12)
    places = policy(hidden.expand(20_000, -1), draws()).place
    mean = policy.mean(hidden)[0]
    assert (places.mean(0) - mean).abs().max() < 4 * 0.11 / math.sqrt(20_000)
    assert_close(places.std(0), torch.full((2,), 0.11), 0.02)


def test_the_density_is_the_normal_one_and_its_gradient_is_the_score() -> None:
    mean, drawn = torch.randn(7, 2, requires_grad=True), torch.randn(7, 2)
    density = ram.log_density(drawn, mean, 0.3)
    assert_close(density, torch.distributions.Normal(mean, 0.3).log_prob(drawn).sum(-1))
    density.sum().backward()
    assert_close(mean.grad, (drawn - mean) / 0.3**2)


def test_the_policy_gives_the_density_of_the_draw_itself() -> None:
    """Not of the place on the border that a far draw is moved to; and the draw carries no gradient."""
    policy = Gaussian(Hyperparameters(hidden=12, deviation=0.8))
    hidden = torch.randn(500, 12)
    choice = policy(hidden, draws())
    mean = policy.mean(hidden)
    drawn = mean + 0.8 * torch.randn(mean.shape, generator=draws())
    assert (drawn.abs() > 1).any() and choice.place.abs().max() == 1
    assert torch.equal(choice.place, drawn.clamp(-1, 1)) and not choice.place.requires_grad
    assert_close(choice.log_probability, torch.distributions.Normal(mean, 0.8).log_prob(drawn).sum(-1))
    choice.log_probability.sum().backward()
    assert_close(policy.mean.bias.grad, ((drawn - mean) / 0.8**2).sum(0), 1e-4)


@pytest.mark.parametrize("baseline", [0.0, -0.7])
def test_reinforce_estimates_the_gradient_of_the_expected_reward(baseline: float) -> None:
    """With a reward of -|l - c|^2 that gradient is -2 (mean - c); a baseline changes its variance alone."""
    mean = torch.tensor([0.3, -0.2], requires_grad=True)
    target, deviation, count = torch.tensor([-0.1, 0.4]), 0.2, 40_000
    drawn = (mean + deviation * torch.randn(count, 2, generator=draws())).detach()
    rewards = -(drawn - target).square().sum(-1, keepdim=True)
    log_probability = ram.log_density(drawn, mean, deviation)[:, None]
    ram.policy_loss(log_probability, rewards, torch.full((count, 1), baseline)).backward()
    estimates = (drawn - mean.detach()) / deviation**2 * (rewards - baseline)
    errors = estimates.std(0) / math.sqrt(count)
    assert mean.grad is not None
    assert ((-mean.grad + 2 * (mean.detach() - target)).abs() < 3 * errors).all()
    assert errors.max() < 0.02


def test_ascending_it_moves_the_policy_to_what_is_rewarded() -> None:
    torch.manual_seed(0)
    policy = Gaussian(Hyperparameters(hidden=1, deviation=0.15))
    rule = torch.optim.SGD(policy.parameters(), lr=0.02)
    target, generator = torch.tensor([0.5, -0.3]), draws()
    for _ in range(200):
        place, log_probability = policy(torch.ones(64, 1), generator)
        rewards = -(place - target).square().sum(-1)
        rule.zero_grad()
        baselines = rewards.mean().expand(64, 1)
        ram.policy_loss(log_probability[:, None], rewards[:, None], baselines).backward()
        rule.step()
    assert (policy.mean(torch.ones(1, 1))[0] - target).abs().max() < 0.05


class Still(nn.Module):
    """A policy of one place, to stand in for the learned one."""

    def __init__(self, sizes: Hyperparameters):
        super().__init__()

    def forward(self, hidden: Tensor, generator: torch.Generator | None = None) -> Choice:
        return Choice(
            hidden.new_tensor([[0.25, -0.5]]).expand(len(hidden), -1), hidden.new_zeros(len(hidden))
        )


def test_another_policy_may_stand_in_the_learned_ones_place() -> None:
    network = model(policy=Still)
    assert not list(network.policy.parameters())
    places = network(images()).places[0]
    assert torch.equal(places[:, 1:], at((0.25, -0.5)).expand(3, 3, 2))
    network.policy = Uniform()  # after training too
    assert network(images()).places[0, :, 1:].unique().numel() == 3 * 3 * 2


def test_random_places_cover_the_image_and_teach_no_policy() -> None:
    network = model(policy=Uniform)
    episode = network(images(), samples=400, generator=draws())
    places = episode.places.flatten(0, 2)
    assert places.abs().max() <= 1
    assert_close(places.square().mean(0), torch.full((2,), 1 / 3), 0.05)
    assert episode.log_probabilities[0, 0, 0] == pytest.approx(math.log(1 / 4))
    assert not ram.losses(episode, torch.tensor([0, 1, 2])).reinforce.requires_grad
    assert trained(network, ram.losses(episode, torch.tensor([0, 1, 2])).total) == {
        "glimpse", "core", "classifier", "baseline",
    }  # fmt: skip


# Episodes and the objective


def test_an_episode_is_its_path_looked_along_and_classified_at_its_end() -> None:
    network, picture = model(), images()
    episode = network(picture, samples=2, generator=draws())
    assert episode.logits.shape == (2, 3, 5) and episode.places.shape == (2, 3, 4, 2)
    for sample in range(2):
        state = None
        for step in range(4):
            place = episode.places[sample, :, step]
            if state is not None:
                assert_close(episode.baselines[sample, :, step - 1], network.baseline(state[0])[:, 0])
            state = network.look(picture, place, state)
        assert state is not None
        assert_close(episode.logits[sample], network.classifier(state[0]))


def test_each_decision_is_taken_from_the_state_before_it() -> None:
    network = model()
    episode = network(images(), generator=draws())
    generator = draws()
    assert torch.equal(episode.places[0, :, 0], 2 * torch.rand(3, 2, generator=generator) - 1)
    state = None
    for step in range(3):
        state = network.look(images(), episode.places[0, :, step], state)
        choice = network.policy(state[0], generator)
        assert_close(episode.places[0, :, step + 1], choice.place)
        assert_close(episode.log_probabilities[0, :, step], choice.log_probability)


def test_each_part_of_the_objective_trains_its_own_parts() -> None:
    """Cross-entropy does not reach the location network; REINFORCE and the baseline stop at h_t."""
    network = model()

    def parts() -> ram.Losses:
        return ram.losses(network(images(), samples=8, generator=draws()), torch.tensor([0, 1, 2]))

    assert trained(network, parts().classification) == {"glimpse", "core", "classifier"}
    assert all(p.grad is None for p in network.policy.parameters())
    assert trained(network, parts().reinforce) == {"policy"}
    assert trained(network, parts().baseline) == {"baseline"}
    assert trained(network, parts().total) == {"glimpse", "core", "classifier", "policy", "baseline"}


def test_the_objective_of_an_episode_by_hand() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 3.0], [0.5, 0.0]]])  # (samples, batch, classes)
    log_probabilities = torch.tensor([[[-1.0, -2.0], [-0.5, 0.5]], [[0.3, -0.1], [-0.7, 0.2]]])
    baselines = torch.tensor([[[0.5, 0.25], [0.1, 0.2]], [[0.9, 0.4], [0.0, 1.0]]])
    episode = ram.Episode(logits, torch.zeros(2, 2, 3, 2), log_probabilities, baselines)
    losses = ram.losses(episode, torch.tensor([0, 0]))
    rewards = [[1, 0], [0, 1]]  # the first sample is right for the first image, the second for the second
    cross_entropy = reinforce = squares = 0.0
    for m in range(2):
        for b in range(2):
            cross_entropy -= float(logits[m, b].log_softmax(-1)[0]) / 4
            for t in range(2):
                advantage = rewards[m][b] - float(baselines[m, b, t])
                reinforce -= float(log_probabilities[m, b, t]) * advantage / 4
                squares += advantage**2 / 4
    assert losses.classification == pytest.approx(cross_entropy)
    assert losses.reinforce == pytest.approx(reinforce)
    assert losses.baseline == pytest.approx(squares)
    assert losses.total == pytest.approx(cross_entropy + reinforce + squares)


def test_the_baseline_takes_no_gradient_from_the_advantage() -> None:
    log_probabilities = torch.randn(4, 3, requires_grad=True)
    baselines = torch.randn(4, 3, requires_grad=True)
    returns = torch.randn(4, 1, requires_grad=True)
    ram.policy_loss(log_probabilities, returns, baselines).backward()
    assert baselines.grad is None and returns.grad is None
    assert_close(log_probabilities.grad, -(returns - baselines) / 4)


def test_the_baseline_regresses_to_the_expected_reward() -> None:
    baselines = torch.zeros(2, 2, 1, requires_grad=True)
    logits = torch.tensor([[[1.0, 0.0]] * 2, [[0.0, 1.0]] * 2])
    none = torch.zeros(2, 2, 1)
    ram.losses(ram.Episode(logits, none, none, baselines), torch.tensor([0, 0])).baseline.backward()
    assert baselines.grad is not None
    assert baselines.grad[..., 0].tolist() == [[-0.5, -0.5], [0, 0]]  # 2 (b - R) / 4


def test_with_one_glimpse_there_is_nothing_to_choose() -> None:
    network = model(Hyperparameters(patch=4, glimpses=1, channels=2))
    episode = network(images(), samples=2)
    losses = ram.losses(episode, torch.tensor([0, 1, 2]))
    assert episode.log_probabilities.shape == (2, 3, 0)
    assert losses.reinforce == 0 and losses.baseline == 0
    assert losses.total == losses.classification and losses.total.isfinite()


def test_evaluation_averages_probabilities_over_paths() -> None:
    network = model()
    network.classifier.weight.data *= 20
    episode = network(images(), 50, draws())
    probabilities = network.predict(images(), 50, draws())
    each = F.softmax(episode.logits.detach(), -1)
    assert_close(probabilities, sum(each[i] for i in range(50)) / 50)
    assert_close(probabilities.sum(-1), torch.ones(3))
    assert (each.std(0) > 0.01).any()  # paths do differ
    assert not probabilities.requires_grad


def test_more_paths_give_a_steadier_estimate() -> None:
    network = model()
    network.classifier.weight.data *= 20
    generator = draws()
    few, many = (
        torch.stack([network.predict(images(), samples, generator) for _ in range(30)]).var(0).mean()
        for samples in (1, 25)
    )
    assert many < few / 8


def test_samples_are_independent_and_draws() -> None:
    network = model()
    first, again = (network(images(), 2, draws(5)) for _ in range(2))
    assert torch.equal(first.places, again.places)
    assert not torch.equal(first.places[0], first.places[1])


def test_initialisation_is_redone_by_reset_parameters() -> None:
    network = model()
    before = {name: p.clone() for name, p in network.named_parameters()}
    network.reset_parameters()
    assert all(not torch.equal(p, before[name]) for name, p in network.named_parameters())
    assert network.core.from_hidden.weight.abs().max() <= 1 / math.sqrt(12)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(RequestError, match=r"\(batch, 2, height, width\), not \(3, 1, 20, 16\)"):
        model()(images(channels=1))
    with pytest.raises(RequestError, match="at least one sample, not 0"):
        model()(images(), samples=0)
    with pytest.raises(ConfigError, match="glimpses 0, scales 1, patch 8"):
        Hyperparameters(glimpses=0)
    with pytest.raises(ConfigError, match="above 0, not 0"):
        Hyperparameters(deviation=0)
