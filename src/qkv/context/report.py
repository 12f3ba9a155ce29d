"""A measured context as text, and as one offline page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from qkv.charts import Axis, Panel, Series, curves, heat, picture
from qkv.context.measure import DEPTHS, Context
from qkv.context.tasks import SPAN
from qkv.inspection.page import document


def lines(found: Context) -> Iterator[str]:
    yield f"{found.name}: advertised {found.advertised:,} tokens, usable {found.usable:,}"
    yield f"  by loss on {found.about}: {found.by_loss:,}"
    yield f"  by pass keys that came back: {found.by_retrieval:,}"
    yield f"  by copying: {found.by_copying:,}"
    yield ""
    yield f"Loss of the same {SPAN} tokens, with so many read:"
    yield f"{'tokens':>10}{'nats':>8}   gain"
    for one in found.given:
        yield f"{one.context:>10,}{one.loss:>8.3f}{one.gain:>8.3f} +- {one.error:.3f}"
    yield ""
    yield "Pass keys that came back, by length and depth of the text:"
    yield f"{'tokens':>10}" + "".join(f"{depth:>7.0%}" for depth in DEPTHS) + f"{'all':>8}"
    for length, share in found.shares.items():
        row = {f.depth: f"{f.right}/{f.asked}" for f in found.found if f.length == length}
        yield f"{length:>10,}" + "".join(f"{row.get(depth, ''):>7}" for depth in DEPTHS) + f"{share:>8.0%}"
    yield ""
    yield "Copying tokens that stood so many tokens before:"
    for copied in found.copied:
        yield f"{copied.distance:>10,}  {copied.again:.3f} nats, the first time {copied.first:.3f}"
    if found.extensions:
        yield ""
        yield from _extended(found)


def _extended(found: Context) -> Iterator[str]:
    longest = found.extensions[0].buckets[-1].end
    factor = found.extensions[0].factor
    yield f"Without training, slowed by {factor:g}, a text of {longest:,} tokens past {found.advertised:,}:"
    for kind, loss in found.order():
        yield f"{kind:>10}  {loss:.3f} nats"
    yield (
        "The papers have, without training, NTK and YaRN before linear interpolation, and none last "
        "(bloc97 2023; Peng et al. 2023, table 1 after tuning); here: "
        + ", ".join(kind for kind, _ in found.order())
        + "."
    )


def page(found: Context) -> str:
    """A whole HTML document that needs nothing but itself."""
    said = list(lines(found))
    head = "".join(f"<p>{escape(line.strip())}</p>" for line in said[:4])
    table = escape("\n".join(said[5:]))
    charts = "".join(f'<div class="diagram">{picture(panel)}</div>' for panel in _panels(found))
    body = (
        f"<h1>{escape(found.name)}: its context, measured</h1>{head}"
        f'<div class="columns"><div><section><pre style="overflow-x:auto">{table}</pre></section></div>'
        f"<div>{charts}</div></div>"
    )
    return document(f"{found.name}: context", body)


def _panels(found: Context) -> list[Panel]:
    panels = [
        curves(
            f"Loss of the same {SPAN} tokens",
            [Series(found.name, [g.context for g in found.given], [[g.loss for g in found.given]])],
            Axis("tokens read", log=True),
            Axis("loss, nats"),
        ),
        heat(
            "Pass keys that came back",
            [[_share(found, length, depth) for depth in DEPTHS] for length in found.shares],
            [f"{length:,}" for length in found.shares],
            [f"{depth:.0%}" for depth in DEPTHS],
            "tokens",
            "depth",
        ),
        curves(
            "Copying",
            [
                Series("seen before", [c.distance for c in found.copied], [[c.again for c in found.copied]]),
                Series(
                    "the first time", [c.distance for c in found.copied], [[c.first for c in found.copied]]
                ),
            ],
            Axis("distance, tokens", log=True),
            Axis("loss, nats"),
        ),
    ]
    if found.extensions:
        panels.append(
            curves(
                "Extensions without training",
                [
                    Series(one.kind, [b.end for b in one.buckets], [[b.loss for b in one.buckets]])
                    for one in found.extensions
                ],
                Axis("position, tokens", log=True),
                Axis("loss, nats"),
            )
        )
    return panels


def _share(found: Context, length: int, depth: float) -> float:
    one = next(f for f in found.found if (f.length, f.depth) == (length, depth))
    return one.right / one.asked
