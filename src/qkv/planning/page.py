"""A plan as one offline page: the parts as bars, and curves over context and over sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from qkv.charts import Axis, Panel, Series, curves, picture
from qkv.inspection.page import document
from qkv.planning.cache import layers
from qkv.planning.plan import parts_at
from qkv.planning.result import Plan, lines
from qkv.planning.sizes import Part, shown
from qkv.planning.timing import Costs, attention_flops

GB = 1e9
POINTS = 24  # of a curve


def page(found: Plan) -> str:
    """A whole HTML document that needs nothing but itself."""
    title = f"{found.source.name}: what it takes"
    text = list(lines(found))
    head = "".join(f"<p>{escape(line)}</p>" for line in text[:2])
    rest = "".join(_said(line) for line in text[text.index("", 3) :] if line)
    charts = "".join(f'<div class="diagram">{picture(panel)}</div>' for panel in _panels(found))
    body = (
        f"<h1>{escape(title)}</h1>{head}"
        f'<div class="columns"><div><section><h2>Memory</h2>{_bars(found)}</section>'
        f"<section>{rest}</section></div><div>{charts}</div></div>"
    )
    return document(title, body)


def _said(line: str) -> str:
    """A line, and below it in small what it was computed from."""
    first, *below = (escape(part.strip()) for part in line.split("\n"))
    return f"<p>{first}</p>" + "".join(f'<p class="soft">{part}</p>' for part in below)


def _bars(found: Plan) -> str:
    rows = [_bar(part, found.bytes) for part in found.parts]
    least, most = found.range
    rows.append(
        f'<div class="part"><span><b>in all</b></span><span>{shown(found.bytes)}</span><span></span></div>'
        f'<p class="soft">between {shown(least)} and {shown(most)}</p>'
    )
    return "".join(rows)


def _bar(part: Part, total: int) -> str:
    share = part.bytes / max(1, total)
    return (
        f'<div class="part"><span>{escape(part.name)}</span><span>{shown(part.bytes)}</span>'
        f'<span>{share:.0%}</span><div class="bar" style="width:{100 * share:.2f}%"></div></div>'
        f'<p class="soft">{escape(part.formula)}</p>'
    )


def _panels(found: Plan) -> list[Panel]:
    asked = found.asked
    longest = max(2 * asked.context, 4096)
    contexts = _spread(16, longest)
    many = _spread(1, max(4 * asked.concurrency, 64))
    panels = [
        _memory(
            found, "Memory over context", contexts, lambda n: parts_at(found, context=n), "context, tokens"
        ),
        _memory(found, "Memory over sequences", many, lambda n: parts_at(found, concurrency=n), "sequences"),
    ]
    if found.profile is not None:
        cost = Costs(found.source.model, found.how, found.profile, asked.devices)
        kept = layers(found.source.model, asked.kv, asked.source, asked.devices)
        speed = [n / cost.decode(kept, asked.context, n).seconds for n in many]
        panels.append(
            curves(
                f"Tokens a second, {asked.context:,} of context",
                [
                    Series("all sequences", many, [speed]),
                    Series("each", many, [[s / n for s, n in zip(speed, many, strict=True)]]),
                ],
                Axis("sequences", log=True),
                Axis("tokens a second", log=True),
            )
        )
    cross = found.crossover.scores or 0
    return [*panels, _operations(found, _spread(16, max(longest, 2 * cross)))]


def _memory(
    found: Plan, title: str, at: Sequence[int], of: Callable[[int], Sequence[Part]], label: str
) -> Panel:
    each = [of(n) for n in at]
    total = [sum(part.bytes for part in some) / GB for some in each]
    cache = [sum(part.bytes for part in some if part.name.startswith("cache")) / GB for some in each]
    marks = {} if found.asked.memory is None else {"memory there is": found.asked.memory / GB}
    highest = max(total)
    shown_marks = {name: value for name, value in marks.items() if value < 4 * highest}
    return curves(
        title,
        [Series("in all", at, [total]), Series("cache", at, [cache])],
        Axis(label, log=True),
        Axis("GB", marks=shown_marks),
    )


def _operations(found: Plan, contexts: Sequence[int]) -> Panel:
    """Operations of a token at the end of a text: where attention overtakes the feed-forward."""
    model = found.source.model
    width = model.trunk.width
    forward = 2 * sum(
        tensor.used
        for mixer in model.trunk.mixers()
        if mixer.role == "feed_forward"
        for tensor in mixer.tensors(width)
        if tensor.multiplies
    )
    mixing = [attention_flops(model, n) / n / 1e9 for n in contexts]
    return curves(
        "Operations a token of a whole text",
        [
            Series("scores and mixtures", contexts, [mixing]),
            Series("feed-forward", contexts, [[forward / 1e9] * len(contexts)]),
        ],
        Axis("length, tokens", log=True),
        Axis("GFLOP", log=True),
    )


def _spread(low: int, high: int) -> list[int]:
    """Whole numbers from low to high, evenly by their logarithms."""
    ratio = (high / low) ** (1 / (POINTS - 1))
    return sorted({min(high, max(low, round(low * ratio**i))) for i in range(POINTS)})
