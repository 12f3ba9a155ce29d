"""The page and the picture, of figures made up for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from benchmarks import report, run
from benchmarks.cases import Case, Group
from benchmarks.measure import Measured, Outcome, Started
from benchmarks.picture import draw, rows
from qkv.benching.figures import Sample

GROUP = Group("smollm2-135m", "Q8_0", 2)
SVG = "{http://www.w3.org/2000/svg}"


def outcome(*decode: float, others: float = 0.0) -> Outcome:
    samples = [Sample(10 * speed, speed, 30e9, others) for speed in decode]
    return Outcome("Q8_0", samples=samples, same=[16] * len(samples))


@pytest.fixture
def measured() -> Measured:
    refused = Outcome(error="CTranslate2 has\nno such weights.")
    engines = {"qkv": outcome(190.0, 200.0, 210.0), "llama": outcome(90.0, 100.0, others=0.2), "ct2": refused}
    return Measured(Case(GROUP), 150e6, engines, "2026-01-02 03:04 UTC")


def test_a_row_has_medians_spreads_the_share_and_how_many_rounds_were_quiet(measured: Measured) -> None:
    first, second = report.case_rows(measured, {"qkv": "qkv 0.1.0"})
    assert first == [
        "qkv 0.1.0: Q8_0", "**2,000** (1,900-2,100)", "**200** (190-210)", "100 %", "16.0", "3 of 3",
    ]  # fmt: skip
    assert second[2:] == ["**95.0** (90.0-100)", "48 %", "16.0", "0 of 2"]


def test_numbers_keep_three_digits() -> None:
    assert [report.number(x) for x in (2134.4, 100.2, 23.44, 1.234)] == ["2,134", "100", "23.4", "1.23"]
    assert report.spread([5.0]) == "5.00"
    assert report.spread([]) == ""


def test_a_table_is_markdown() -> None:
    assert report.table(("a", "b"), [("x", "1")]) == "| a | b |\n|---|---:|\n| x | 1 |"


def test_the_page_says_the_limit_the_load_and_what_was_not_measured(measured: Measured) -> None:
    machine = {"processor": "Zen 4", "cores": 2, "instructions": ["avx512f"], "system": "Linux 6"}
    facts = {"date": "2026-01-02", "machine": machine, "load_average": (0.5, 1.0, 2.0)}
    memory = {"resident": 250e6, "peak": 300e6, "anonymous": 100e6}
    started = [Started(GROUP, "qkv", "qkv 0.1.0", "Q8_0", seconds=[0.5, 0.4, 0.6], memory=memory)]
    page = report.document(facts, [measured], started, "../how.md")
    assert "(../how.md)" in page
    assert "load average before the last run, 2026-01-02: 0.5, 1.0, 2.0" in page
    assert "150.0 MB a token: at most 200 tokens/s. Measured 2026-01-02 03:04 UTC." in page
    assert "| qkv: smollm2-135m Q8_0, 2 threads | **0.50** (0.40-0.60) | 250 | 300 |" in page
    assert "- ct2: CTranslate2 has no such weights (1 case)" in page
    assert page.index("one stream") < page.index("Start and memory")


def test_a_run_of_a_part_keeps_the_others_and_their_dates(measured: Measured, tmp_path: Path) -> None:
    machine = {"processor": "Zen 4", "cores": 2, "instructions": ["avx512f"], "system": "Linux 6"}
    facts = {"date": "2026-01-02", "machine": machine, "load_average": (0.5, 1.0, 2.0)}
    many = replace(measured, case=Case(GROUP, streams=8))
    memory = {"resident": 250e6, "peak": 300e6}
    starts = [Started(GROUP, name, name, seconds=[0.5], memory=memory) for name in ("qkv", "llama")]
    run.write(tmp_path, facts, [measured, many], starts)
    assert run.kept(tmp_path, machine) == ([measured, many], starts)
    again = replace(measured, case=Case(GROUP, rounds=3), outcomes={"qkv": outcome(300.0)}, date="2026-02-03")
    longer = replace(measured, case=Case(GROUP, prompt=1024))
    assert run.joined([measured, many], [longer, again]) == [again, many, longer]
    again, more = replace(starts[1], seconds=[0.2]), replace(starts[1], engine="ct2")
    assert run.added(starts, [again, more]) == [*starts, more]
    assert run.kept(tmp_path / "none", machine) == ([], [])
    with pytest.raises(click.ClickException, match=r"of another machine \(Zen 4\): choose --out"):
        run.kept(tmp_path, {**machine, "instructions": ["avx512f", "amx_int8"]})


def test_the_picture_has_a_bar_for_each_engine_and_both_speeds(measured: Measured) -> None:
    drawn = ElementTree.fromstring(draw([measured]))
    titles = [each.text for each in drawn.iter(f"{SVG}title")]
    assert titles == ["qkv 200.0", "llama 95.0", "qkv 2000.0", "llama 950.0"]
    bars = [
        float(each.get("width", 0))
        for each in drawn.iter(f"{SVG}rect")
        if each.find(f"{SVG}title") is not None
    ]
    assert bars[0] / bars[1] == pytest.approx(200 / 95, rel=1e-2)
    limits = [each for each in drawn.iter(f"{SVG}path") if each.get("class") == "limit"]
    assert len(limits) == 2  # in the legend, and of decoding


def test_the_picture_shows_one_stream_with_the_most_threads(measured: Measured) -> None:
    alone = Measured(Case(GROUP._replace(threads=1)), 300e6, measured.outcomes)
    many = Measured(Case(GROUP, streams=8), 150e6, measured.outcomes)
    (row,) = rows([alone, measured, many], "decode")
    assert (row.label, row.limit) == ("Q8_0", 200.0)
    assert draw([]).startswith("<svg")
