"""The report in docs/ is what its results give: no word of it is written by hand."""

from __future__ import annotations

from pathlib import Path

from qkv.claims import kept
from qkv.claims.pages import write_markdown

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_report_is_that_of_the_results_beside_it(tmp_path: Path) -> None:
    report = kept(["all"], out=DOCS / "claims")
    for file in write_markdown(report, tmp_path / "claims.md"):
        same = DOCS / file.relative_to(tmp_path)
        assert same.read_text(encoding="utf-8") == file.read_text(encoding="utf-8"), same.name
