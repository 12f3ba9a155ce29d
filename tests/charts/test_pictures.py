"""Pictures: where things are drawn, that they are whole, and that their text stays inside and apart."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from qkv.charts.pictures import HALF, INSIDE, Bar, Panel, Series, bars, curves, heat, path, picture
from qkv.charts.scales import Axis, Scale, number
from qkv.inspection.drawing import WIDTH, breadth

SVG = "{http://www.w3.org/2000/svg}"
LOSS = curves(
    "Loss",
    [
        Series("search", [1, 2, 3], [[3.0, 2.0, 1.0], [3.2, 2.1, 1.2], [2.9, 1.9, 1.1]]),
        Series("a <second> one with a name that is long", [1, 2, 3], [[3.0, None, 2.5]]),
    ],
    Axis("step"),
    Axis("nats a character", marks={"chance": 3.3}),
)


def parsed(panel: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(picture(panel))


def texts(root: ElementTree.Element) -> list[str]:
    return [part.text or "" for part in root.iter(f"{SVG}text")]


def paths(root: ElementTree.Element, kind: str) -> list[list[tuple[float, float]]]:
    found = []
    for part in root.iter(f"{SVG}path"):
        if kind in part.get("class", "").split():
            numbers = [float(n) for n in re.findall(r"-?[\d.]+", part.get("d", ""))]
            found.append(list(zip(numbers[::2], numbers[1::2], strict=False)))
    return found


# scales


def test_a_linear_scale_puts_its_ends_at_its_ends() -> None:
    scale = Scale.of(Axis("x"), [2.0, 4.0]).onto(100, 200)
    assert [scale(2), scale(3), scale(4), scale(9)] == [100, 150, 200, 200]


def test_a_logarithmic_scale_puts_equal_ratios_at_equal_distances() -> None:
    scale = Scale.of(Axis("x", log=True), [1.0, 100.0, 0.0, -3.0, math.nan]).onto(0, 100)
    assert [scale(1), scale(10), scale(100)] == pytest.approx([0, 50, 100])
    assert scale.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Scale.of(Axis("x", log=True), [1e-6, 1e3]).ticks() == pytest.approx(
        [10.0**p for p in range(-6, 4)]
    )


def test_a_logarithmic_scale_between_two_powers_has_ticks_all_the_same() -> None:
    assert Scale.of(Axis("x", log=True), [2.6, 4.9]).ticks() == [3, 3.5, 4, 4.5]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([1.0, 1500.0], [0, 500, 1000, 1500]),
        ([3.2, 4.1], [3.2, 3.4, 3.6, 3.8, 4.0]),
        ([5.0], [4.6, 4.8, 5.0, 5.2, 5.4]),
        ([], [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_round_numbers_are_written(values: list[float], ticks: list[float]) -> None:
    assert Scale.of(Axis("x"), values).ticks() == pytest.approx(ticks)


def test_given_ticks_and_ends_are_kept() -> None:
    scale = Scale.of(Axis("x", low=0, high=10, ticks=(0, 5, 20)), [3.0])
    assert (scale.low, scale.high, scale.ticks()) == (0, 10, [0, 5])


def test_ticks_have_the_digits_that_tell_them_apart() -> None:
    found = Scale.of(Axis("loss"), [6.50491, 6.50507])
    assert found.labels() == ["6.50495", "6.505", "6.50505"]
    assert Scale.of(Axis("loss"), [6.4, 6.6]).labels() == ["6.4", "6.45", "6.5", "6.55", "6.6"]


def test_numbers_are_written_as_people_do() -> None:
    assert [number(v) for v in (0, 0.05, 1.5, 12345.6, 3e-6, 0.12345, -3000)] == [
        "0", "0.05", "1.5", "12,346", "3e-06", "0.123", "-3,000",
    ]  # fmt: skip


# panels


def test_curves_are_the_median_over_seeds_within_a_band() -> None:
    root = parsed(LOSS)
    median, gapped = paths(root, "curve")[2:]  # the first two are the legend's
    assert len(median) == 3 and len(gapped) == 2  # None is left out
    xs, ys = zip(*median, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    assert (ys[2] - ys[1]) / (ys[1] - ys[0]) == pytest.approx(0.9, abs=0.01)  # 3.0, 2.0, 1.1
    (band,) = paths(root, "band")
    assert [y < m for (_, y), m in zip(band[:3], ys, strict=True)] == [True] * 3  # the most is higher up
    assert [y > m for (_, y), m in zip(band[:2:-1], ys, strict=True)] == [True] * 3
    assert len(paths(root, "mark")) == 2  # in the plot and in the legend


def test_bars_are_as_long_as_their_medians() -> None:
    root = parsed(bars("B", [Bar("one", [1, 3, 2]), Bar("four", [4.0])], Axis("bytes")))
    widths = [float(part.get("width", "")) for part in root.iter(f"{SVG}rect") if part.get("class") == "f0"]
    assert widths[1] / widths[0] == pytest.approx(2, abs=0.01)
    assert len(paths(root, "range")) == 1  # one seed has no spread


def test_a_heat_map_has_a_cell_where_there_is_weight_as_dark_as_it_is_great() -> None:
    root = parsed(heat("A", [[1.0, 0.0], [0.25, 0.5]], ["x", "y"], ["a", "b"], "target", "source"))
    cells = [part for part in root.iter(f"{SVG}rect") if part.get("class") == "cell"]
    assert [float(cell.get("opacity", "")) for cell in cells] == [1.0, 0.25, 0.5]
    x, y = ([float(cell.get(axis, "")) for cell in cells] for axis in "xy")
    assert x[0] == x[1] < x[2] and y[0] < y[1] == y[2]  # rows down, columns across
    assert "target down, source across; full colour: 1" in texts(root)


def test_names_of_a_large_map_are_thinned_out_evenly() -> None:
    names = [f"t{i}" for i in range(60)]
    shown = texts(parsed(heat("A", [[1.0] * 60] * 60, names, names)))
    rows = [text for text in shown if text in names]
    steps = {int(b[1:]) - int(a[1:]) for a, b in pairwise(rows) if int(b[1:]) > int(a[1:])}
    assert len(steps) == 1 and steps.pop() * (INSIDE - 30) / 60 >= 12


def test_a_path_is_drawn_in_pixels_of_its_image_and_numbered() -> None:
    root = parsed(path("P", [[0.0, 1.0], [0.5, 0.5]], [(0, 0), (2, 1)], sizes=[1]))
    ((first, second),) = paths(root, "path")
    assert second[0] - first[0] == pytest.approx(HALF, abs=0.11)
    assert second[1] - first[1] == pytest.approx(HALF / 2, abs=0.11)
    assert texts(root) == ["P", "1", "2"]
    fills = [part.get("fill") for part in root.iter(f"{SVG}rect") if part.get("fill")]
    assert fills == ["#000000", "#ffffff", "#808080"]  # equal neighbours are one


def test_panels_stand_side_by_side_where_they_fit() -> None:
    half, whole = Panel(HALF, 50, "half", ""), Panel(INSIDE, 50, "whole", "")
    root = ElementTree.fromstring(picture(half, half, whole, half))
    places = [part.get("transform") for part in root.iter(f"{SVG}g")]
    assert places == [
        "translate(8 8)",
        f"translate({8 + HALF + 14:g} 8)",
        "translate(8 72)",
        "translate(8 136)",
    ]
    assert root.get("width") == str(WIDTH) and root.get("aria-label") == "half; half; whole; half"


BAR = bars(
    "A title", [Bar("a name " * 12, [12345.0, 9.0], "kind one"), Bar("b", [1.0], "kind two")], Axis("B")
)
MAP = heat("A", [[1.0, 0.2]] * 3, ["long token", "b", "c"], ["a very long column", "b"], "q", "k")


DENSE = curves(
    "Many ticks",
    [Series("a", [100, 120, 130, 2048], [[1.0, 2.0, 3.0, 4.0]])],
    Axis("tokens", log=True, ticks=[100, 120, 130, 1900, 2048]),
    Axis("nats"),
    width=HALF,
)


@pytest.mark.parametrize("panel", [LOSS, BAR, MAP, DENSE], ids=["curves", "bars", "heat", "ticks"])
def test_text_stays_inside_and_apart(panel: Panel) -> None:
    """At the widths of a wide font; 12 pixels or more, as the picture is 360 wide."""
    root = parsed(panel)
    boxes = []
    for part in root.iter(f"{SVG}text"):
        width = breadth(part.text or "") * (14.7 if part.get("class") == "title" else 12)
        x, y = float(part.get("x", "")), float(part.get("y", ""))
        if part.get("transform"):  # upright: from its place upwards
            boxes.append((x - 11, y - width, x + 2, y, part.text))
            continue
        x -= {"end": width, "middle": width / 2}.get(part.get("text-anchor", ""), 0)
        boxes.append((x, y - 11, x + width, y + 2, part.text))
    for place, one in enumerate(boxes):
        assert one[0] >= -1 and one[2] <= panel.width + 1, one
        assert one[1] >= 0 and one[3] <= panel.height + 1, one
        for two in boxes[place + 1 :]:
            apart = one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]
            assert apart, (one, two)


def test_colours_are_defined_for_light_and_dark() -> None:
    text = picture(LOSS)
    light, dark = text.split("prefers-color-scheme:dark")
    for name in ("--ink", "--soft", "--paper", "--heat", *(f"--s{i}" for i in range(6))):
        assert f"{name}:#" in light and f"{name}:#" in dark
