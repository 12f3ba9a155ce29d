"""A measured context, or the ways that were compared, as one offline page."""

from __future__ import annotations

from html import escape

from qkv.charts import Axis, Bar, Panel, Series, bars, curves, heat, picture
from qkv.context.budget import Compared, Way
from qkv.context.result import DEPTHS, Context, lines
from qkv.context.tasks import SPAN
from qkv.inspection.page import document, listing


def page(found: Context | Compared) -> str:
    """A whole HTML document that needs nothing but itself."""
    if isinstance(found, Compared):
        return _compared(found)
    said = list(lines(found))
    head = "".join(f"<p>{escape(line.strip())}</p>" for line in said[:4])
    head = f'<div class="verdict">{head}</div>'
    return _document(f"{found.name}: its context, measured", head, listing(said[5:]), _panels(found))


def _document(title: str, head: str, body: str, panels: list[Panel]) -> str:
    charts = "".join(f'<div class="diagram">{picture(panel)}</div>' for panel in panels)
    columns = f'<div class="columns"><div><section>{body}</section></div><div>{charts}</div></div>'
    return document(title, f"<h1>{escape(title)}</h1>{head}{columns}")


def _compared(found: Compared) -> str:
    title = f"{found.name}: longer context, compression or retrieval?"
    head = (
        f'<p>{escape(found.about)}</p><p class="soft">What each way answered right, of the same questions, '
        "and what an answer cost.</p>"
    )
    costs = [
        bars("Cache", [Bar(way.name, [way.cache_bytes / 1e6]) for way in found.ways], Axis("MB")),
        bars("Time", [Bar(way.name, [way.seconds]) for way in found.ways], Axis("seconds an answer")),
    ]
    return _document(title, head, "".join(map(_way, found.ways)), costs)


def _way(way: Way) -> str:
    share = way.right / way.asked
    bar = f'<div class="bar" style="width:{100 * share:.2f}%"></div>' if way.right else ""
    return (
        f'<div class="part"><span>{escape(way.name)}</span><span>{way.right} of {way.asked}</span>'
        f"<span>{share:.0%}</span>{bar}</div>"
        f'<p class="soft">{way.read:,} tokens read, {way.cache_bytes / 1e6:,.1f} MB of cache, '
        f"{way.seconds:.2f} s an answer</p>"
    )


def _panels(found: Context) -> list[Panel]:
    panels = [
        curves(
            f"Loss of the same {SPAN} tokens",
            [Series(found.name, [g.context for g in found.given], [[g.loss for g in found.given]])],
            Axis("tokens read", log=True, ticks=[g.context for g in found.given]),
            Axis("loss, nats"),
        ),
        heat(
            "Pass keys that came back",
            [[_share(found, length, depth) for depth in DEPTHS] for length in found.shares],
            [f"{length:,}" for length in found.shares],
            [f"{100 * depth:.0f}" for depth in DEPTHS],
            "tokens",
            "depth in %",
        ),
        curves(
            "Copying",
            [
                Series("seen before", [c.distance for c in found.copied], [[c.again for c in found.copied]]),
                Series(
                    "the first time", [c.distance for c in found.copied], [[c.first for c in found.copied]]
                ),
            ],
            Axis("distance, tokens", log=True, ticks=[c.distance for c in found.copied]),
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
                Axis("position, tokens", log=True, ticks=[b.end for b in found.extensions[0].buckets]),
                Axis("loss, nats"),
            )
        )
    return panels


def _share(found: Context, length: int, depth: float) -> float:
    one = next(f for f in found.found if (f.length, f.depth) == (length, depth))
    return one.right / one.asked
