"""A plan as one offline page: the parts as bars, and curves over context and over sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from qkv.charts import Axis, Panel, Series, curves, picture
from qkv.inspection.page import document
from qkv.inspection.words import share_words
from qkv.planning.cache import layers
from qkv.planning.plan import costs, parts_at
from qkv.planning.profile import Profile
from qkv.planning.result import Plan, crossover, fit, lines, speed
from qkv.planning.sizes import Part, shown
from qkv.planning.timing import attention_flops

GB = 1e9
POINTS = 24  # of a curve


def page(found: Plan) -> str:
    """A whole HTML document that needs nothing but itself."""
    title = f"{found.source.name}: what it takes"
    head = "".join(f"<p>{escape(line)}</p>" for line in list(lines(found))[:2])
    sections = [
        ("Memory", _bars(found.parts, found.range)),
        ("What fits", _said(fit(found))),
        ("How fast", _said(speed(found))),
        ("Attention and feed-forward", _said(crossover(found))),
        ("Training, AdamW in mixed precision", _bars(found.training) if found.training else ""),
        ("Notes", _said(found.notes)),
    ]
    shown_sections = "".join(f"<section><h2>{name}</h2>{body}</section>" for name, body in sections if body)
    charts = "".join(f'<div class="diagram">{picture(panel)}</div>' for panel in _panels(found))
    columns = f'<div class="columns"><div>{shown_sections}</div><div>{charts}</div></div>'
    return document(title, f"<h1>{escape(title)}</h1>{head}{columns}")


def _said(lines: Iterable[str]) -> str:
    """Each line a paragraph, and below it in small what it was computed from."""
    found = []
    for line in lines:
        # a number stays with its unit
        first, *below = (escape(part.strip().replace(" %", "\u00a0%")) for part in line.split("\n"))
        found.append(f"<p>{first}</p>" + "".join(f'<p class="soft">{part}</p>' for part in below))
    return "".join(found)


def _bars(parts: Sequence[Part], ends: tuple[int, int] | None = None) -> str:
    total = sum(part.bytes for part in parts)
    whole = f"<span><b>in all</b></span><span>{shown(total)}</span><span></span>"
    between = f'<p class="soft">between {shown(ends[0])} and {shown(ends[1])}</p>' if ends else ""
    each = "".join(_bar(part, total) for part in parts)
    return f'{each}<div class="part">{whole}</div>{between}'


def _bar(part: Part, total: int) -> str:
    share = part.bytes / max(1, total)
    off = f" (to {part.band:.0%})" if part.band else ""
    bar = f'<div class="bar" style="width:{100 * share:.2f}%"></div>' if part.bytes else ""
    return (
        f'<div class="part"><span>{escape(part.name)}</span><span>{shown(part.bytes)}</span>'
        f"<span>{share_words(share)}</span>{bar}</div>"
        f'<p class="soft">{escape(part.formula + off)}</p>'
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
        rate = rates(found, found.profile, many)
        panels.append(
            curves(
                f"Tokens a second, {asked.context:,} of context",
                [
                    Series("all sequences", many, [rate]),
                    Series("each", many, [[s / n for s, n in zip(rate, many, strict=True)]]),
                ],
                Axis("sequences", log=True),
                Axis("tokens a second", log=True),
            )
        )
    cross = found.crossover.scores or 0
    return [*panels, _operations(found, _spread(16, max(longest, 2 * cross)))]


def rates(found: Plan, at: Profile, many: Sequence[int]) -> list[float]:
    """Tokens a second in all, with so many sequences of the plan's context."""
    asked = found.asked
    cost = costs(found.source, found.how, at, asked.devices)
    kept = layers(found.source.model, asked.kv, asked.source, asked.devices)
    return [n / cost.decode(kept, asked.context, n).seconds for n in many]


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
