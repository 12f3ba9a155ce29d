"""An inspection as one offline page: the eight steps, the diagram, who sees whom."""

from __future__ import annotations

from html import escape

from qkv.inspection.diagram import diagram, masks
from qkv.inspection.report import Inspection, keys_of
from qkv.inspection.steps import parts

STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6676;--line:#d7dde5;--paper:#fff;
--band:#f6f8fa;--bar:#6b8fd6}
@media (prefers-color-scheme:dark){:root{--ink:#e8edf4;--soft:#a5b1c2;--line:#303a47;--paper:#12161c;
--band:#1a2029;--bar:#4a6db5}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}main{max-width:1180px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:0 0 4px}
p{margin:2px 0}.soft{color:var(--soft);font-size:.86rem;overflow-wrap:anywhere}
.columns{display:grid;grid-template-columns:minmax(0,1fr);gap:24px}
@media (min-width:1000px){.columns{grid-template-columns:minmax(0,1fr) 460px}}
section{padding:12px 0;border-top:1px solid var(--line)}
svg{max-width:100%;height:auto}
.verdict{background:var(--band);border-radius:8px;padding:10px 14px;margin:14px 0}
.masks{display:flex;flex-wrap:wrap;gap:18px}figure{margin:0;max-width:220px}
figcaption{font-size:.86rem;color:var(--soft)}
table{border-collapse:collapse;width:100%;font-size:.92rem}td{padding:3px 6px 3px 0;vertical-align:middle}
td.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.bar{background:var(--bar);height:10px;border-radius:3px;min-width:1px}
"""


def page(found: Inspection) -> str:
    """A whole HTML document that needs nothing but itself."""
    picture = diagram(found.model) if found.model else ""
    body = f"""
<h1>{escape(found.name)}</h1>
<p class="soft">{escape(_size(found))}</p>
{_verdict(found)}
<div class="columns"><div>{_steps(found)}{_parts(found)}{_masks(found)}{_open_ends(found)}</div>
<div>{picture}</div></div>"""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(found.name)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>"
    )


def _size(found: Inspection) -> str:
    return found.title.removeprefix(found.name).strip() or "its structure could not be described"


def _verdict(found: Inspection) -> str:
    lines = "".join(f"<p>{escape(line[0].upper() + line[1:])}</p>" for line in found.verdict.lines())
    return f'<div class="verdict"><h2>Context</h2>{lines}</div>' if found.model else ""


def _steps(found: Inspection) -> str:
    sections = []
    for step in found.steps:
        lines = "".join(f"<p>{escape(line)}</p>" for line in step.lines if not line.startswith("Context: "))
        keys = [f"{key} = {_brief(found.evidence[key])}" for key in keys_of(step, found.evidence)]
        source = f'<p class="soft">{escape(", ".join(keys))}</p>' if keys else ""
        sections.append(f"<section><h2>{step.number} {escape(step.title)}</h2>{lines}{source}</section>")
    return "".join(sections)


def _brief(value: object) -> str:
    words = str(value)
    return words if len(words) <= 60 else words[:57] + "..."


def _parts(found: Inspection) -> str:
    if found.model is None:
        return ""
    total = found.model.parameters()
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td style="width:40%"><div class="bar" '
        f'style="width:{100 * count / total:.2f}%"></div></td><td class="number">{count:,}</td>'
        f'<td class="number">{count / total:.1%}</td></tr>'
        for name, count in parts(found.model)
    )
    return f"<section><h2>Parameters by part</h2><table>{rows}</table></section>"


def _masks(found: Inspection) -> str:
    if found.model is None:
        return ""
    figures = "".join(
        f"<figure>{picture}<figcaption>{escape(where)}: {escape(words)}</figcaption></figure>"
        for where, words, picture in masks(found.model)
    )
    note = "A row a query, a column a key; dark is visible. Wide windows are drawn narrower."
    return (
        f'<section><h2>What a token sees</h2><p class="soft">{note}</p>'
        f'<div class="masks">{figures}</div></section>'
    )


def _open_ends(found: Inspection) -> str:
    sections = []
    for title, items in (("Not known", found.unknown), ("Not stated in the files", found.unstated)):
        if items:
            listed = "".join(f"<p>{escape(item)}</p>" for item in items)
            sections.append(f"<section><h2>{title}</h2>{listed}</section>")
    return "".join(sections)
