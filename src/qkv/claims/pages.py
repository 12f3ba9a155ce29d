"""The report as one offline page, and as Markdown with its pictures beside it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from qkv.claims.report import Outcome, Report, circumstances, minutes
from qkv.errors import SourceError

TITLE = "What the literature claims, and what came out here"
INTRODUCTION = (
    "Each claim was turned into a small experiment, and what to expect of it was written down before "
    "anything was measured. The checks say which parts of the expectation came out; the verdict follows "
    "from them alone. A claim that does not hold at this size may well hold at another."
)
STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#566070;--line:#d7dde5;--paper:#fff;--band:#f6f8fa;
--yes:#0b7a53;--no:#a3123f}
@media (prefers-color-scheme:dark){:root{--ink:#e8edf4;--soft:#b4bfce;--line:#303a47;--paper:#12161c;
--band:#1a2029;--yes:#5fd3a5;--no:#ff8fab}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}main{max-width:1120px;margin:0 auto;padding:20px 12px 60px}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.1rem;margin:0 0 4px}p{margin:4px 0;overflow-wrap:anywhere}
a{color:inherit}.soft{color:var(--soft);font-size:.9rem}
section{padding:18px 0;border-top:1px solid var(--line)}
.index{list-style:none;margin:14px 0;padding:0}
.index li{display:grid;grid-template-columns:minmax(0,1fr) 7em 4.2em;gap:0 8px;padding:3px 0;max-width:640px}
.index span+span{text-align:right}
.verdict{background:var(--band);border-radius:8px;padding:8px 12px;margin:10px 0;font-weight:600}
.checks{list-style:none;margin:8px 0;padding:0}.checks li{display:grid;grid-template-columns:2.4em 1fr;
margin:6px 0;overflow-wrap:anywhere}.yes{color:var(--yes)}.no{color:var(--no)}
.pictures{display:flex;flex-wrap:wrap;gap:16px;margin-top:12px}.pictures svg{display:block;width:360px;
max-width:100%;height:auto}
@media (max-width:400px){.pictures{margin:12px -12px 0}}
"""


def html(report: Report) -> str:
    """A whole document that needs nothing but itself."""
    index = "".join(
        f'<li><a href="#{escape(outcome.claim.name)}">{escape(outcome.claim.name)}</a>'
        f"<span>{escape(outcome.brief)}</span><span>{minutes(outcome.seconds)}</span></li>"
        for outcome in report.outcomes
    )
    closing = "".join(f'<p class="soft">{escape(line)}</p>' for line in report.closing())
    body = "".join(_section(outcome) for outcome in report.outcomes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{TITLE}</title><style>{STYLE}</style></head><body><main><h1>{TITLE}</h1>"
        f'<p>{INTRODUCTION}</p>{closing}<ul class="index">{index}</ul>{body}</main></body></html>\n'
    )


def _section(outcome: Outcome) -> str:
    claim = outcome.claim
    checks = "".join(
        f'<li><b class="{"yes" if check.holds else "no"}">{"yes" if check.holds else "no"}</b>'
        f'<span>{escape(check.what)}<br><span class="soft">{escape(check.measured)}</span></span></li>'
        for check in outcome.checks
    )
    pictures = "".join(outcome.pictures.values())
    times = ", ".join(minutes(result.seconds) for result in outcome.results)
    taken = (
        f'<p class="soft">{len(outcome.results)} seeds: {times}; {minutes(outcome.processor)} of processors.'
        f"{_over(outcome)}</p>"
        if times
        else ""
    )
    return (
        f'<section id="{escape(claim.name)}"><h2>{escape(claim.name)} '
        f'<span class="soft">{escape(claim.number)}</span></h2><p>{escape(claim.statement)}</p>'
        f'<p class="soft">{escape(claim.source)}</p><p class="soft">Expected: {escape(claim.expectation)}</p>'
        f'<p class="verdict">{escape(_capital(outcome.verdict))}</p><ul class="checks">{checks}</ul>{taken}'
        f'<div class="pictures">{pictures}</div></section>'
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _over(outcome: Outcome) -> str:
    return " That is over what a claim may take." if outcome.over else ""


def markdown(report: Report, folder: str) -> str:
    """The report as text; its pictures are looked for in this folder beside it."""
    lines = [f"# {TITLE}", "", INTRODUCTION, ""]
    for line in report.closing():
        lines += [line, ""]
    lines += ["| claim | | verdict | time (of all cores) |", "|---|---|---|---|"]
    for outcome in report.outcomes:
        name = outcome.claim.name
        row = (f"[{name}](#{name})", outcome.claim.number, outcome.brief, outcome.time)
        lines.append(f"| {' | '.join(row)} |")
    for outcome in report.outcomes:
        lines += ["", *_part(outcome, folder)]
    return "\n".join(lines) + "\n"


def _part(outcome: Outcome, folder: str) -> list[str]:
    claim = outcome.claim
    lines = [f"## {claim.name}", "", f"{claim.number}: {_plain(claim.statement)} {_plain(claim.source)}.", ""]
    lines += [f"Expected: {_plain(claim.expectation)}", "", f"**{_plain(_capital(outcome.verdict))}.**", ""]
    if outcome.checks:
        lines += ["| holds | what | measured |", "|---|---|---|"]
        lines += [
            f"| {'yes' if check.holds else 'no'} | {_cell(check.what)} | {_cell(check.measured)} |"
            for check in outcome.checks
        ]
        lines.append("")
    if outcome.results:
        times = ", ".join(f"{result.seed}: {minutes(result.seconds)}" for result in outcome.results)
        where = " ".join(circumstances(outcome.results))
        taken = f"{times}; of processors {minutes(outcome.processor)}"
        lines += [f"Time by seed: {taken}.{_over(outcome)} {_plain(where)}", ""]
    for name in outcome.pictures:
        lines.append(f"![{claim.name}: {name}]({folder}/{_file(outcome, name)})")
    return lines


def _plain(words: str) -> str:
    """What Markdown would take for its own is shown as it stands."""
    return "".join(f"\\{one}" if one in "\\`*_<>[]#|~$" else one for one in words)


def _cell(words: str) -> str:
    return _plain(words).replace("\n", " ")


def _file(outcome: Outcome, name: str) -> str:
    return f"{outcome.claim.name}-{name}.svg"


def write_markdown(report: Report, path: Path) -> list[Path]:
    """Writes the report to `path`, its pictures into a folder of the same name beside it; gives the files.

    Raises SourceError where one cannot be written.
    """
    folder = path.with_suffix("")
    texts = {path: markdown(report, folder.name)}
    for outcome in report.outcomes:
        for name, picture in outcome.pictures.items():
            texts[folder / _file(outcome, name)] = picture + "\n"
    for file, text in texts.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as problem:
            raise SourceError(f"{file} cannot be written: {problem.strerror}.") from None
    return list(texts)
