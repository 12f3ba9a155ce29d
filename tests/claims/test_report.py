"""The report of fixed results: its table, its data and its pages."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qkv.claims.claim import Check, Claim
from qkv.claims.pages import html, markdown, write_markdown
from qkv.claims.report import Outcome, Report
from qkv.claims.running import Result

CLAIM = Claim(
    name="rising",
    number="H99",
    statement="Values <rise> & stay.",
    source="Nobody 2000",
    expectation="They | rise to *10* <b>.",
    experiment="none",
)
MACHINE = {"processor": "A <fast> one", "cores": 2}
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"><text>loss</text></svg>'


def result(seed: int, seconds: float = 90.0, date: str = "2026-11-30") -> Result:
    versions = {"torch": "2.13.0", "qkv": "0.1.0"}
    return Result("rising", seed, "full", {"a": 1}, seconds, 2 * seconds, date, MACHINE, versions, 2, "f")


CHECKS = (Check("they rise", "1 to 10", True), Check("they stay <up>", "0.5 | 1", False))
PART = Outcome(CLAIM, (result(0), result(1, date="2026-12-02")), CHECKS, {"loss": PICTURE})
BROKEN = Outcome(CLAIM, (), error="seed 0: KeyError: 'b'")


def test_the_table_names_verdict_time_and_every_check() -> None:
    assert str(Report((PART,))).splitlines() == [
        "claim                                 verdict            time (of all cores)",
        "",
        "rising (H99)                          1 of 2 hold          3.0 min (6.0 min)",
        "  yes  they rise: 1 to 10",
        "  no   they stay <up>: 0.5 | 1",
        "",
        "Measured on A <fast> one, 2 cores, with torch 2.13.0 on 2 threads.",
        "Date: 2026-11-30 to 2026-12-02. Seeds: 0, 1. In brackets: least and greatest of the seeds.",
        "Times are the clock's, on a busy machine more than was needed; in brackets those of all cores.",
    ]
    lines = str(Report((BROKEN,), "smoke")).splitlines()
    assert lines[2] == "rising (H99)                          not measured             0.0 s (0.0 s)"
    assert lines[3] == "     seed 0: KeyError: 'b'"
    assert lines[-1] == "Smoke sizes show that the experiments run: their verdicts mean nothing."


@pytest.mark.parametrize(("seconds", "over"), [(200.0, False), (201.0, True)])
def test_a_claim_over_ten_minutes_is_reported_as_over(seconds: float, over: bool) -> None:
    outcome = Outcome(CLAIM, tuple(result(seed, seconds) for seed in range(3)), CHECKS)
    report = Report((outcome,))
    assert outcome.data()["over"] == over
    assert ("Over 10 minutes for all seeds: rising." in str(report)) == over
    assert ("over what a claim may take" in html(report)) == over
    assert ("over what a claim may take" in markdown(report, "c")) == over


def test_what_waited_for_others_is_not_over() -> None:
    waited = replace(result(0), seconds=900.0, processor=500.0)
    assert not Outcome(CLAIM, (waited,), CHECKS).over
    assert Outcome(CLAIM, (replace(waited, processor=601.0),), CHECKS).over


def test_the_data_holds_claim_checks_and_runs() -> None:
    (found,) = Report((PART,)).data()["claims"]
    assert found["verdict"] == 'holds only in part: not "they stay <up>"'
    assert found["expectation"] == CLAIM.expectation and found["seconds"] == 180
    assert found["processor_seconds"] == 360 and found["runs"][1]["processor_seconds"] == 180
    assert found["checks"][1] == {"what": "they stay <up>", "measured": "0.5 | 1", "holds": False}
    assert [run["seed"] for run in found["runs"]] == [0, 1] and found["runs"][0]["figures"] == {"a": 1}


def test_failure_is_of_experiments_and_not_of_claims() -> None:
    assert not Report((PART,)).failed and Report((PART, BROKEN)).failed


class Reader(HTMLParser):
    """Text, open tags that are never closed, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.fetched, self.open = "", list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href") and not (v or "").startswith("#")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_escaped_and_offline() -> None:
    page = html(Report((PART, BROKEN)))
    reader = Reader()
    reader.feed(page)
    assert reader.open == [] and reader.fetched == [] and "http" not in page.replace("http://www.w3.org", "")
    for words in (
        "Values <rise> & stay.",
        "They | rise to *10* <b>.",
        "they stay <up>",
        "A <fast> one",
        "1.5 min",
    ):
        assert words in reader.text
    assert PICTURE in page and "width=device-width" in page and "prefers-color-scheme:dark" in page
    assert "Not measured: seed 0: KeyError" in reader.text


def test_the_markdown_names_everything_and_its_pictures_lie_beside_it(tmp_path: Path) -> None:
    files = write_markdown(Report((PART, BROKEN)), tmp_path / "docs" / "claims.md")
    assert [str(file.relative_to(tmp_path)) for file in files] == [
        "docs/claims.md",
        "docs/claims/rising-loss.svg",
    ]
    assert files[1].read_text() == PICTURE + "\n"
    text = files[0].read_text()
    assert "| [rising](#rising) | H99 | 1 of 2 hold | 3.0 min (6.0 min) |" in text
    assert "Expected: They \\| rise to \\*10\\* \\<b\\>." in text
    assert '**Holds only in part: not "they stay \\<up\\>".**' in text
    assert "| no | they stay \\<up\\> | 0.5 \\| 1 |" in text
    assert (
        "Time by seed: 0: 1.5 min, 1: 1.5 min; of processors 6.0 min. Measured on A \\<fast\\> one, 2 cores"
        in text
    )
    for _, link in re.findall(r"!\[(.*?)\]\((.*?)\)", text):
        assert (files[0].parent / link).is_file()
