"""H1: the judge both ways, and what is pasted where."""

from __future__ import annotations

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import glimpses
from qkv.claims.experiments.glimpses import (
    CANVAS,
    FEW,
    GLIMPSES,
    MANY,
    REAL,
    SCRAP,
    SCRAPS,
    Images,
    apart,
    clothes,
    cut,
    enlarged,
    glyphs,
    judge,
    pasted,
    squares,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def figures() -> Figures:
    return {
        "images": REAL,
        "errors": {str(number): 50.0 - 5 * number for number in GLIMPSES},
        "random": 35.0,
        "all, clutter": 60.0,
        "all, no clutter": 30.0,
        "clothes": {str(FEW): 30.0, str(MANY): 20.0},
    }


def failed(*seeds: Figures) -> list[str]:
    return [check.what for check in judge(seeds) if not check.holds]


def test_all_holds_of_figures_as_expected() -> None:
    assert len(judge([figures()] * 3)) == 7 and failed(figures(), figures()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": "made-up glyphs"}, "real"),
        ({"errors": {"1": 34.0, "3": 35.0, "6": 20.0}}, "from 1 to 3"),
        ({"errors": {"1": 45.0, "3": 19.0, "6": 20.0}}, "from 3 to 6"),
        ({"random": 19.0}, "random"),
        ({"all, no clutter": 61.0}, "clutter costs"),
        ({"all, clutter": 19.0, "all, no clutter": 10.0}, "errs there more"),
        ({"clothes": {"2": 20.0, "7": 21.0}}, "clothes"),
        ({"clothes": {"2": 20.0, "7": None}}, "clothes"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(change: Figures, words: str) -> None:
    (what,) = failed(figures(), figures() | change)
    assert words in what


def test_clothes_that_are_not_here_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glimpses, "there_is", lambda name: False)
    assert clothes(Run("glimpses", 0)) is None
    (check,) = [check for check in judge([figures() | {"clothes": None}]) if not check.holds]
    assert check.measured.startswith("not measured: Fashion-MNIST is not here")


def test_an_image_is_pasted_whole_and_anywhere() -> None:
    images = Images(torch.rand(500, 16, 16, generator=draws()) + 0.1, torch.arange(500))
    made = pasted(images, None, draws(1))
    assert made.pixels.shape == (500, CANVAS, CANVAS) and torch.equal(made.labels, images.labels)
    corners = set()
    for canvas, image in zip(made.pixels, images.pixels, strict=True):
        row, column = (int(part.min()) for part in canvas.nonzero(as_tuple=True))
        assert torch.equal(canvas[row : row + 16, column : column + 16], image)
        assert torch.count_nonzero(canvas) == 256
        corners.add((row, column))
    rows, columns = zip(*corners, strict=True)
    assert set(rows) == set(columns) == set(range(CANVAS - 16 + 1))


def test_scraps_hide_nothing_and_are_of_other_images() -> None:
    """Black images among white ones: all that is white is four scraps; and white ones stay white."""
    black, white = torch.zeros(50, 16, 16), torch.ones(50, 16, 16)
    labels = torch.zeros(50, dtype=torch.long)
    made = pasted(Images(black, labels), Images(white, labels), draws()).pixels
    lit = made.flatten(1).sum(1)
    assert float(lit.max()) == SCRAPS * SCRAP**2 and float(lit.min()) >= SCRAP**2
    under = pasted(Images(white, labels), Images(black + 0.5, labels), draws()).pixels
    assert bool(((under == 1).flatten(1).sum(1) == 256).all())


def test_a_scrap_is_a_square_of_the_image() -> None:
    image = torch.arange(256.0).view(1, 16, 16).expand(200, -1, -1)
    found = cut(image, SCRAP, draws())
    first = found[:, 0, 0]
    steps = torch.arange(SCRAP)
    assert torch.equal(found, first[:, None, None] + 16.0 * steps[:, None] + steps)
    assert int(first.min()) == 0 and int(first.max()) == 8 * 16 + 8
    assert len(squares(3, 16, SCRAP, draws())[0]) == SCRAP**2


def test_those_tested_on_were_not_learned_from() -> None:
    images = Images(torch.zeros(30, 8, 8), torch.arange(30))
    train, test = apart(Run("glimpses", 0), images, 20, 10)
    assert sorted(torch.cat([train.labels, test.labels]).tolist()) == list(range(30))
    other, _ = apart(Run("glimpses", 1), images, 20, 10)
    assert train.labels.tolist() != other.labels.tolist()


def test_made_up_digits_differ_from_one_another() -> None:
    """The nearest mean of others has the same label: they can be told apart, and not by one pixel."""
    images = glyphs(draws(), 400)
    assert images.pixels.shape == (400, 8, 8) and float(images.pixels.max()) <= 1
    means = torch.stack([images.pixels[:200][images.labels[:200] == digit].mean(0) for digit in range(10)])
    apart_by = (images.pixels[200:, None] - means).square().sum((-1, -2))
    assert torch.equal(apart_by.argmin(-1), images.labels[200:])


def test_twice_the_size_is_twice_the_size() -> None:
    images = enlarged(glyphs(draws(), 5), 2)
    assert images.pixels.shape == (5, 16, 16)
