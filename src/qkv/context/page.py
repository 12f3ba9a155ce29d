"""A measured context as one offline page."""

from __future__ import annotations

from html import escape

from qkv.charts import Axis, Panel, Series, curves, heat, picture
from qkv.context.result import DEPTHS, Context, lines
from qkv.context.tasks import SPAN
from qkv.inspection.page import document


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
