"""ConvS2S (D9): what an output sees, every factor, the scaled gradient, the start, against loops by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError, RequestError
from qkv.lineage.convs2s import (
    ENGLISH_GERMAN,
    ENGLISH_ROMANIAN,
    Convolution,
    ConvS2S,
    Encoder,
    Hyperparameters,
    Source,
    Training,
    objective,
    receptive_field,
)
from tests.support import assert_close

SMALL = Hyperparameters(width=6, encoder=((8, 3), (8, 5)), decoder=((8, 3), (10, 2), (10, 3)), output=5)
SOURCE, TARGET = torch.tensor([[3, 4, 5, 2, 7]]), torch.tensor([[1, 6, 3, 8]])
PRESENT = torch.ones(1, 5, dtype=torch.bool)
HALF = 0.5**0.5


def random(hyper: Hyperparameters = SMALL, position: spec.Position | None = spec.Learned(12)) -> Any:
    model = ConvS2S(9, 9, hyper, position).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=2.0 if name.endswith("length") else 0.5)
    return model


# --- what is seen -----------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "kernel", "seen"), [(6, 5, 25), (20, 3, 41)])
def test_blocks_see_so_many_inputs(blocks: int, kernel: int, seen: int) -> None:
    """D9: the derivative of one output by its inputs; as many on either side."""
    widths = ((4, kernel),) * blocks
    encoder: Any = Encoder(9, Hyperparameters(4, widths, widths), None).double()
    for parameter in encoder.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 61, 4, dtype=torch.float64, requires_grad=True)
    encoder.convolved(x, torch.ones(1, 61, dtype=torch.bool))[0, 30].sum().backward()
    reached = x.grad.abs().sum(-1)[0].nonzero()[:, 0].tolist()  # type: ignore[union-attr]
    assert reached == list(range(30 - seen // 2, 30 + seen // 2 + 1)) and len(reached) == seen
    assert receptive_field(widths) == seen


def test_a_decoder_sees_as_many_inputs_and_all_of_them_before_it() -> None:
    """D9: kernel - 1 places of padding on the left, none on the right; its attention looks at the source."""
    hyper = Hyperparameters(4, ((4, 1),), ((4, 3), (4, 4), (4, 1)), 4)
    model = random(hyper, None).double()
    for attention in model.decoder.attention:
        nn.init.zeros_(attention.output.length)  # what was said is also asked with: not what is meant here
    table = model.decoder.embedding
    seen: dict[str, Tensor] = {}
    table.register_forward_hook(lambda *call: seen.update(x=call[2]) or call[2].retain_grad())
    model(SOURCE, PRESENT, torch.arange(9)[None])[0, 7].sum().backward()
    reached = seen["x"].grad.abs().sum(-1)[0].nonzero()[:, 0].tolist()  # type: ignore[union-attr]
    assert reached == [2, 3, 4, 5, 6, 7] and receptive_field(hyper.decoder) == 6


# --- the formulas, one number at a time -------------------------------------------------------


def affine(part: Convolution, x: Tensor, window: list[Tensor] | None = None) -> Tensor:
    """sum over the window of g v / |v| times its inputs, output by output."""
    inputs, out = [x] if window is None else window, []
    for channel in range(len(part.bias)):
        direction = part.direction[channel]
        weights = part.length[channel] * direction / math.sqrt(float(direction.square().sum()))
        out.append(sum(weights[:, i] @ each for i, each in enumerate(inputs)) + part.bias[channel])
    return torch.stack(out)  # type: ignore[arg-type]


def gated(block: Any, window: list[Tensor]) -> Tensor:
    both = affine(block.convolution, window[0], window)
    half = len(both) // 2
    return both[:half] * torch.sigmoid(both[half:])


def shortcut(block: Any, x: Tensor) -> Tensor:
    return x if isinstance(block.residual, nn.Identity) else affine(block.residual, x)


def read_by_hand(encoder: Any, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    table, places = encoder.embedding.weight, encoder.embedding.position.weight
    e = [table[token] + places[i] for i, token in enumerate(tokens)]
    x = [affine(encoder.into, each) for each in e]
    for block in encoder.blocks:
        side = (block.convolution.kernel - 1) // 2
        around = [torch.zeros_like(x[0])] * side
        padded = around + x + around
        v = [gated(block, padded[i : i + 2 * side + 1]) for i in range(len(x))]
        x = [(v[i] + shortcut(block, x[i])) * HALF for i in range(len(x))]
    z = [affine(encoder.output, each) for each in x]
    return z, [(z[i] + e[i]) * HALF for i in range(len(z))]


@torch.no_grad()
def test_equals_the_equations_by_hand() -> None:
    """Equations 1 and 2 and every factor, in loops; the weights of all layers too."""
    model = random()
    decoder, (keys, values) = model.decoder, read_by_hand(model.encoder, SOURCE[0].tolist())
    table, places, m = decoder.embedding.weight, decoder.embedding.position.weight, len(keys)
    g = [table[token] + places[i] for i, token in enumerate(TARGET[0].tolist())]
    x, shares = [affine(decoder.into, each) for each in g], []
    for block, attention in zip(decoder.blocks, decoder.attention, strict=True):
        kernel = block.convolution.kernel
        padded = [torch.zeros_like(x[0])] * (kernel - 1) + x
        following = []
        for i in range(len(x)):
            v = gated(block, padded[i : i + kernel])
            asked = (affine(attention.query, v) + g[i]) * HALF
            weights = torch.stack([asked @ key for key in keys]).softmax(0)
            mixed = sum(weights[j] * values[j] for j in range(m)) * (m * math.sqrt(1 / m))
            v = (affine(attention.output, mixed) + v) * HALF  # type: ignore[arg-type]
            following.append((v + shortcut(block, x[i])) * HALF)
            shares.append(weights)
        x = following
    logits = [affine(decoder.logits, affine(decoder.output, each)) for each in x]
    assert_close(model(SOURCE, PRESENT, TARGET)[0], torch.stack(logits))
    mean = torch.stack(shares).view(3, 4, m).mean(0)
    assert_close(model.alignment(SOURCE, PRESENT, TARGET)[0], mean)


@torch.no_grad()
def test_sums_and_means_keep_the_variance() -> None:
    """D9: two streams of variance 1 times sqrt(.5), and a mean of m rows times sqrt(m), have variance 1."""
    model = random(replace(SMALL, width=400, decoder=((400, 3),)))
    block, attention = model.decoder.blocks[0], model.decoder.attention[0]
    x, v = torch.randn(2, 50, 400), torch.randn(2, 50, 400)
    assert float(block.ended(x, v).var()) == pytest.approx(1, rel=0.03)
    nn.init.zeros_(attention.query.length)
    nn.init.zeros_(attention.query.bias)
    source = Source(
        torch.zeros(2, 9, 400), torch.randn(2, 9, 400), torch.arange(9) < torch.tensor([[9], [4]])
    )
    seen: list[Tensor] = []
    attention.output.register_forward_hook(lambda *call: seen.append(call[1][0]))
    attention(v, torch.randn(2, 50, 400), source)  # keys of zeros: each of 9, or of 4, counts alike
    assert_close(seen[0][0, 0], source.values[0].sum(0) / 3)
    assert_close(seen[0][1, 0], source.values[1, :4].sum(0) / 2)
    assert float(seen[0].var()) == pytest.approx(1, rel=0.15)


# --- gradients --------------------------------------------------------------------------------


def gradients(hyper: Hyperparameters = SMALL, factor: float | None = None) -> dict[str, Tensor]:
    """`factor` in the place of the model's own."""
    torch.manual_seed(3)
    model = random(hyper)
    model.encoder.gradient = model.encoder.gradient if factor is None else factor
    model(SOURCE, PRESENT, TARGET).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_into_the_encoder_are_divided_by_the_layers_that_attend() -> None:
    """Section 3.4: all but that of the words themselves; three decoder layers. The output is as before."""
    once, whole, none = gradients(), gradients(factor=1), gradients(factor=0)
    halved = gradients(replace(SMALL, encoder_gradient=0.5))  # as the authors' code has it
    name = "encoder.blocks.1.convolution.direction"
    assert_close(halved[name], whole[name] / 6)
    for name, gradient in once.items():
        if name.startswith("decoder"):
            assert torch.equal(gradient, whole[name])
        elif "embedding" in name:  # (z + e): the direct part stays, what comes through z is a third
            direct = none[name]
            assert direct.abs().max() > 1e-3
            assert_close(gradient - direct, (whole[name] - direct) / 3, 1e-4)
        else:
            assert whole[name].abs().max() > 0
            assert_close(gradient, whole[name] / 3)


def test_the_length_of_a_direction_says_nothing() -> None:
    """Weight norm: w = g v / |v|, so that v may be of any length and its gradient is across it."""
    part = Convolution(3, 4, 2)
    part.reset_parameters()
    x = torch.randn(2, 5, 3)
    before = part(x)
    assert_close(before, F.conv1d(x.transpose(1, 2), part.direction, part.bias).transpose(1, 2))
    before.square().sum().backward()
    gradient: Any = part.direction.grad
    assert_close((gradient * part.direction).sum((1, 2)) + 1, torch.ones(4), 1e-4)
    with torch.no_grad():
        part.direction *= 7
        assert_close(part(x), before)
        part.length *= 2
        assert_close(part(x), 2 * before)


# --- the start --------------------------------------------------------------------------------


def test_parameters_start_as_the_paper_says() -> None:
    """Section 3.5: N(0, .1) tables, N(0, sqrt(4p/n)) before a GLU, N(0, sqrt(p/n)), p where dropout was."""
    blocks = ((64, 3), (96, 5))
    model: Any = ConvS2S(300, 300, Hyperparameters(50, blocks, blocks, 40, dropout=0.2))
    stds = {
        model.encoder.embedding.weight: 0.1,
        model.decoder.embedding.position.weight: 0.1,
        model.encoder.into.direction: (0.8 / 50) ** 0.5,
        model.decoder.blocks[1].convolution.direction: (4 * 0.8 / (5 * 64)) ** 0.5,
        model.encoder.blocks[1].residual.direction: (1 / 64) ** 0.5,
        model.encoder.output.direction: (1 / 96) ** 0.5,
        model.decoder.attention[1].query.direction: (1 / 96) ** 0.5,
        model.decoder.attention[0].output.direction: (1 / 50) ** 0.5,
        model.decoder.output.direction: (1 / 96) ** 0.5,
        model.decoder.logits.direction: (0.8 / 40) ** 0.5,
    }
    for parameter, std in stds.items():
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05)
        assert abs(float(parameter.detach().mean())) < 0.1 * std
    for part in (part for part in model.modules() if isinstance(part, Convolution)):
        assert not part.bias.any()
        assert_close(part.weight, part.direction)


def test_sizes_and_settings_of_the_paper() -> None:
    """English-Romanian: 20 blocks of 512 channels and kernel 3 a side; parameters by hand, 40,000 entries."""
    assert (ENGLISH_ROMANIAN.width, ENGLISH_ROMANIAN.encoder) == (512, ((512, 3),) * 20)
    assert [receptive_field(h.encoder) for h in (ENGLISH_ROMANIAN, ENGLISH_GERMAN)] == [41, 27]
    assert Training() == Training(rate=0.25, momentum=0.99, clip=0.1, shrink=0.1, least=1e-4, batch=64)
    with torch.device("meta"):
        model = ConvS2S(40_000, 40_000)

    def affine_of(into: int, out: int, kernel: int = 1) -> int:
        return kernel * into * out + 2 * out  # and a length and a bias an output

    table, map_ = (40_000 + 1024) * 512, affine_of(512, 512)
    block = affine_of(512, 1024, 3)
    encoder = table + 2 * map_ + 20 * block
    decoder = table + 2 * map_ + 20 * (block + 2 * map_) + affine_of(512, 40_000)
    assert sum(p.numel() for p in model.parameters()) == encoder + decoder


def test_dropout_is_on_embeddings_inputs_of_convolutions_and_the_output() -> None:
    """Section 4.2; none of it outside training. With all dropped, biases alone are left."""
    model = random(replace(SMALL, dropout=1.0))
    assert torch.equal(model(SOURCE, PRESENT, TARGET), model(SOURCE, PRESENT, TARGET))
    model.train()
    assert_close(model(SOURCE, PRESENT, TARGET), model.decoder.logits.bias.expand(1, 4, 9))
    inputs: list[tuple[Any, Tensor]] = []
    for part in (p for p in model.modules() if isinstance(p, Convolution)):
        part.register_forward_hook(lambda part, given, _: inputs.append((part, given[0])))
    model(SOURCE, PRESENT, TARGET)
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    emptied = [*(b.convolution for b in blocks), model.encoder.into, model.decoder.into, model.decoder.logits]
    assert [not given.any() for _, given in inputs] == [part in emptied for part, _ in inputs]


# --- the objective, and what is refused -------------------------------------------------------


def test_the_objective_is_the_mean_over_all_tokens() -> None:
    """Not over sentences: three tokens and one; what is not there may be anything."""
    logits = torch.randn(2, 4, 5)
    target = torch.tensor([[0, 2, 3, 1], [0, 1, -7, 99]])
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]) == 1
    logs = logits.log_softmax(-1)
    expected = -(logs[0, 0, 2] + logs[0, 1, 3] + logs[0, 2, 1] + logs[1, 0, 1]) / 4
    assert_close(objective(logits, target, present), expected)


def test_it_learns_a_sentence_by_heart() -> None:
    torch.set_num_threads(1)  # matrices so small that two threads would wait for one another
    model = ConvS2S(9, 9, Hyperparameters(16, ((16, 3),) * 2, ((16, 3),) * 2, 16, dropout=0.0))
    settings = Training()
    optimiser = settings.optimiser(model.parameters())
    for _ in range(30):
        optimiser.zero_grad()
        loss = objective(model(SOURCE, PRESENT, TARGET), TARGET, torch.ones(1, 4, dtype=torch.bool))
        loss.backward()  # type: ignore[no-untyped-call]
        settings.clipped(model.parameters())
        assert sum(float(p.grad.square().sum()) for p in model.parameters()) < 0.1001**2  # type: ignore[union-attr]
        optimiser.step()
    assert float(loss.detach()) < 0.05


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="The decoder's blocks are"):
        Hyperparameters(decoder=())
    with pytest.raises(ConfigError, match="The encoder's blocks are"):
        Hyperparameters(encoder=((8, 0),))
    model = random(position=spec.Learned(4))
    with pytest.raises(RequestError, match="Position 4 has no row"):
        model(SOURCE, PRESENT, TARGET)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        model(SOURCE[:, :3], PRESENT[:, :3], TARGET + 4)
