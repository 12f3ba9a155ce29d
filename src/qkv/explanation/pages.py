"""An explanation as one offline page to explore: choose what the tokens are coloured by."""

from __future__ import annotations

import json
from html import escape

import numpy as np

from qkv.charts import Axis, Panel, Series, curves, heat, picture
from qkv.explanation.behaviour import Behaviour
from qkv.explanation.explained import Explained, Pairs, asked, heading, measured
from qkv.explanation.result import Evidence
from qkv.inspection.page import document, listing

STYLE = """<style>
.strip{font-size:1.15rem;line-height:2.1;margin:10px 0}.strip span{padding:3px 1px;border-radius:3px;
white-space:pre-wrap}.pick{display:flex;flex-wrap:wrap;gap:8px;margin:6px 0}
select{font:inherit;padding:2px 6px;background:var(--paper);
color:var(--ink);border:1px solid var(--line);border-radius:5px}
</style>"""
SCRIPT = """<script>
const data=JSON.parse(document.getElementById('data').textContent);
const strip=document.getElementById('strip'),what=document.getElementById('what');
const note=document.getElementById('note');
for(const name of Object.keys(data.rows)){const option=document.createElement('option');
option.textContent=name;what.append(option)}
function paint(){const row=data.rows[what.value],most=Math.max(...row.values.map(v=>Math.abs(v||0)))||1;
strip.replaceChildren(...data.tokens.map((t,i)=>{const s=document.createElement('span');s.textContent=t;
const v=row.values[i];if(v!=null){const a=(Math.abs(v)/most*0.65).toFixed(2);
s.style.background=v>0?`rgba(34,140,80,${a})`:`rgba(190,50,60,${a})`;s.title=t+': '+v.toFixed(3)}return s}));
note.textContent=row.meaning}
what.addEventListener('change',paint);paint();
</script>"""


def page(found: Explained) -> str:
    """A whole HTML document that needs nothing but itself."""
    title = "W" + asked(found).removeprefix("w")
    charts = "".join(f'<div class="diagram">{picture(panel)}</div>' for panel in _panels(found))
    data = json.dumps({"tokens": found.tokens, "rows": _rows(found)}, ensure_ascii=False)
    data = data.replace("</", "<\\/")
    body = (
        f"{STYLE}<h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(line)}</p>" for line in heading(found))
        + f'<p class="verdict">{escape(found.verdict)}</p>'
        '<div class="pick"><label>Tokens coloured by <select id="what"></select></label></div>'
        '<div class="strip" id="strip"></div><p class="soft" id="note"></p>'
        f'<div class="columns"><div><section>{listing(list(measured(found)))}</section></div>'
        f"<div>{charts}</div></div>"
        # what stands in a script element ends at its closing tag, whatever quotes it is in
        f'<script type="application/json" id="data">{data}</script>{SCRIPT}'
    )
    return document(title, body)


def cases_page(found: Behaviour) -> str:
    """What a model does with many prompts, as one offline page."""
    title = f"{found.model} over {len(found.answered):,} cases"
    said = found.lines(most=len(found.answered))
    body = f"<h1>{escape(title)}</h1><section>{listing(said[2:])}</section>"
    return document(title, body)


def _rows(found: Explained) -> dict[str, dict[str, object]]:
    """What tokens can be coloured by: effects first, and attention of every head beside them."""
    count = len(found.tokens)

    def row(values: np.ndarray, meaning: str) -> dict[str, object]:
        padded = [None if np.isnan(v) else float(v) for v in values] + [None] * (count - len(values))
        return {"values": padded, "meaning": meaning}

    rows = {
        "measured effect": row(found.effects.values, f"{found.effects.score} by {found.blank!r}"),
        "integrated gradients": row(found.gradient.values, found.gradient.score),
    }
    mean = np.nanmean(found.attention.values, axis=(0, 1))
    agrees = found.agrees["attention"]
    rows["attention, mean of all heads"] = row(
        mean, f"share of attention; Spearman with the effects {agrees:+.2f}"
    )
    for layer, label in enumerate(found.attention.axes[0].labels):
        for head in range(found.attention.values.shape[1]):
            values = found.attention.values[layer, head]
            if not np.isnan(values).all():
                r = found.agreement.values[layer, head]
                meaning = f"share of attention; Spearman with the effects {r:+.2f}"
                rows[f"attention, layer {label} head {head}"] = row(values, meaning)
    return rows


def _panels(found: Explained) -> list[Panel]:
    behind = list(range(len(found.lens)))
    return [
        _map("What goes without each head", found.heads),
        _map("Heads whose attention agrees with the effects", found.agreement, 0.0),
        curves(
            "Behind each layer",
            [Series("the answer", behind, [[said.metric for said in found.lens]])],
            Axis("layers passed", ticks=behind),
            Axis(found.metric.split(" of ")[0]),
        ),
        *(() if found.pairs is None else _pairs(found.pairs)),
    ]


def _pairs(pairs: Pairs) -> list[Panel]:
    """Effects, and attention beside them where there is any; what is below 0 is left white."""
    panels = [_map(f"{pairs.effects.method.capitalize()}: {pairs.what}", pairs.effects, 0.0)]
    if pairs.weights is not None:
        panels.append(_map("Cross-attention, mean of all heads", pairs.weights, 0.0))
    if pairs.agreement is not None:
        panels.append(_map("Heads whose cross-attention agrees with the effects", pairs.agreement, 0.0))
    return panels


def _map(title: str, evidence: Evidence, least: float | None = None) -> Panel:
    """A matrix by its size, or with what is below `least` as that."""
    rows, columns = evidence.axes
    values = np.abs(evidence.values) if least is None else np.clip(evidence.values, least, None)
    names = [[str(label) for label in axis.labels] for axis in (rows, columns)]
    return heat(title, np.nan_to_num(values).tolist(), names[0], names[1], rows.name, columns.name)
