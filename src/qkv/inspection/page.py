"""An inspection or a comparison as one offline page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from qkv.inspection.comparison import Comparison
from qkv.inspection.diagram import diagram
from qkv.inspection.folding import folded
from qkv.inspection.pictures import masks
from qkv.inspection.report import Inspection, keys_of
from qkv.inspection.steps import parts, stacks
from qkv.inspection.words import share_words

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#566070;--line:#d7dde5;--paper:#fff;
--band:#f6f8fa;--bar:#6b8fd6}
@media (prefers-color-scheme:dark){:root{--ink:#e8edf4;--soft:#b4bfce;--line:#303a47;--paper:#12161c;
--band:#1a2029;--bar:#4a6db5}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:0 0 4px}
h3{font-size:.95rem;margin:0 0 8px;overflow-wrap:anywhere}
p{margin:2px 0;overflow-wrap:anywhere}.soft{color:var(--soft);font-size:.86rem}
.columns{display:grid;grid-template-columns:minmax(0,1fr);gap:24px}
@media (min-width:900px){.columns{grid-template-columns:minmax(0,1fr) minmax(0,420px)}
.columns.even{grid-template-columns:repeat(2,minmax(0,420px))}}
section{padding:12px 0;border-top:1px solid var(--line)}
.diagram svg{display:block;width:100%;max-width:440px;height:auto;margin:0 auto}
.verdict{background:var(--band);border-radius:8px;padding:10px 14px;margin:14px 0}
.masks{display:flex;flex-wrap:wrap;gap:18px}figure{margin:0;width:168px}
figure svg{display:block;max-width:100%}figcaption{font-size:.86rem;color:var(--soft);margin-top:4px}
.part{display:grid;grid-template-columns:1fr auto 6.4em;gap:0 6px;margin:8px 0;font-size:.92rem}
.part span+span{text-align:right;font-variant-numeric:tabular-nums}
.bar{grid-column:1/-1;background:var(--bar);height:8px;border-radius:3px;min-width:2px;justify-self:start}
.change{display:grid;grid-template-columns:1.2em minmax(0,1fr);margin:2px 0}
.change b{color:var(--soft);font-weight:600}
.figure{display:flex;flex-wrap:wrap;gap:0 14px;margin:8px 0;font-variant-numeric:tabular-nums}
.figure span:first-child{width:100%;font-size:.92rem;color:var(--soft)}
@media (min-width:900px){.figure{display:grid;grid-template-columns:1.2fr 1fr 1fr 4em;max-width:860px}
.figure span+span{text-align:right}}
.listing{font:min(.86rem,3vw)/1.5 ui-monospace,monospace}
.listing div{white-space:pre-wrap;overflow-wrap:anywhere;min-height:1.5em;padding-left:4ch;text-indent:-4ch}
"""


def page(found: Inspection | Comparison) -> str:
    """A whole HTML document that needs nothing but itself."""
    if isinstance(found, Comparison):
        return document(f"{found.left.name} and {found.right.name}", _comparison(found))
    picture, seen, ends = "", _masks(found), _open_ends(found)
    if found.model is not None:
        picture = f'<section class="diagram"><h2>Structure</h2>{diagram(found.model)}</section>'
        if sum(len(folded(stack).runs) for _, stack in stacks(found.model)) == 1:  # a short one
            picture, seen = picture + seen, ""
    body = f"""
<h1>{escape(found.name)}</h1>
<p class="soft">{escape(found.size)}</p>
{_verdict(found)}
<div class="columns"><div>{_steps(found)}{_parts(found)}{seen}{ends}</div><div>{picture}</div></div>"""
    return document(found.name, body)


def document(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def listing(lines: Iterable[str]) -> str:
    """Lines of a terminal, their columns kept; up to 48 signs fit a phone, and longer lines wrap."""
    return f'<div class="listing">{"".join(f"<div>{escape(line)}</div>" for line in lines)}</div>'


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]


def _verdict(found: Inspection) -> str:
    lines = "".join(f"<p>{escape(_capital(line))}</p>" for line in found.verdict.lines())
    return f'<div class="verdict"><h2>Context</h2>{lines}</div>' if found.model else ""


def _steps(found: Inspection) -> str:
    sections = []
    for step in found.steps:
        lines = "".join(
            f"<p>{escape(_capital(line))}</p>" for line in step.lines if not line.startswith("Context: ")
        )
        keys = [f"{key} = {_brief(found.evidence[key])}" for key in keys_of(step, found.evidence)]
        source = f'<p class="soft">from {escape(", ".join(keys))}</p>' if keys else ""
        sections.append(f"<section><h2>{step.number} {escape(step.title)}</h2>{lines}{source}</section>")
    return "".join(sections)


def _brief(value: object) -> str:
    """A value as the file spells it, unless it is long."""
    words = json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= 60 else words[:57] + "..."


def _parts(found: Inspection) -> str:
    if found.model is None:
        return ""
    total = found.model.parameters()
    rows = "".join(
        f'<div class="part"><span>{escape(name)}</span><span>{count:,}</span>'
        f'<span>{share_words(count / total)}</span><div class="bar" '
        f'style="width:{100 * count / total:.2f}%"></div></div>'
        for name, count in parts(found.model)
    )
    return f"<section><h2>Parameters by part</h2>{rows}</section>"


def _masks(found: Inspection) -> str:
    if found.model is None:
        return ""
    figures = "".join(
        f"<figure>{picture}<figcaption>{escape(_capital(where))}: {escape(words)}</figcaption></figure>"
        for where, words, picture in masks(found.model)
    )
    note = "A row a query, a column a key; blue is visible. Wide windows are drawn narrower."
    shown = f'<p class="soft">{note}</p><div class="masks">{figures}</div>'
    return f"<section><h2>What is seen</h2>{shown}</section>"


def _open_ends(found: Inspection) -> str:
    sections = []
    stated = [_capital(item) for item in found.unstated]
    for title, items in (("Not known", found.unknown), ("Not stated in the files", stated)):
        if items:
            listed = "".join(f"<p>{escape(item)}</p>" for item in items)
            sections.append(f"<section><h2>{title}</h2>{listed}</section>")
    return "".join(sections)


def _comparison(found: Comparison) -> str:
    """What differs, what follows, and the two structures side by side."""
    names = [found.left.name, found.right.name]
    alike = "" if found.changes else "<p>The two are described alike.</p>"
    changes = "".join(
        f"<section><h2>{change.number} {escape(change.title)}</h2>"
        + _signed("-", change.left)
        + _signed("+", change.right)
        + "</section>"
        for change in found.changes
    )
    pictures = "".join(
        f'<div class="diagram"><h3>{escape(side.name)}</h3>{diagram(side.model)}</div>'
        for side in (found.left, found.right)
        if side.model is not None
    )
    return (
        f"<h1>{escape(' and '.join(names))}</h1>"
        + "".join(
            f'<p class="soft">{sign} {escape(side.name)}: {escape(side.size)}</p>'
            for sign, side in (("-", found.left), ("+", found.right))
        )
        + f"{alike}{changes}{_consequences(found)}"
        + f'<section><h2>Structures</h2><div class="columns even">{pictures}</div></section>'
    )


def _signed(sign: str, lines: tuple[str, ...]) -> str:
    return "".join(f'<div class="change"><b>{sign}</b><span>{escape(line)}</span></div>' for line in lines)


def _consequences(found: Comparison) -> str:
    rows = "".join(
        f'<div class="figure"><span>{escape(one.what)}</span><span>- {one.left:,}</span>'
        f"<span>+ {one.right:,}</span><span>{one.ratio}</span></div>"
        for one in found.consequences
    )
    return f"<section><h2>It follows</h2>{rows}</section>" if rows else ""
