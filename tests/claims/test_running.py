"""Running claims: what is kept, what is measured again, and what goes wrong."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from qkv import cli
from qkv.claims import kept, registry, reproduce
from qkv.claims.report import Report
from qkv.claims.running import plain
from qkv.errors import RequestError, SourceError
from tests.claims.made_up import COUNTS, HEAD, Bench

JUDGE = "\ndef judge(figures):\n    return (Check('all is well', str(figures), True),)\n"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["reproduce", *map(str, arguments)])


def test_seeds_run_in_order_and_are_judged_together(bench: Bench, out: Path) -> None:
    bench.write("rising")
    (outcome,) = reproduce(["rising"], out=out).outcomes
    assert bench.ran() == ["0 full", "1 full", "2 full"]
    assert outcome.checks[0].measured == "[10, 11, 12]" and outcome.verdict == "holds"
    assert [result.seed for result in outcome.results] == [0, 1, 2]


def test_a_run_goes_on_where_another_ended(bench: Bench, out: Path) -> None:
    bench.write("rising")
    reproduce(["rising"], out=out, seeds=2)
    assert bench.ran() == ["0 full", "1 full"]
    (outcome,) = reproduce(["rising"], out=out).outcomes
    assert bench.ran() == ["2 full"] and outcome.checks[0].measured == "[10, 11, 12]"
    reproduce(["rising"], out=out, again=True)
    assert bench.ran() == ["0 full", "1 full", "2 full"]
    reproduce(["rising"], out=out, seeds=1, size="smoke")
    assert bench.ran() == ["0 smoke"]  # another size is another result


def test_a_claim_with_time_for_one_seed_is_run_once(bench: Bench, out: Path) -> None:
    claim = bench.write("rising")
    other = bench.write("other")
    bench.monkeypatch.setattr(registry, "_CLAIMS", (replace(claim, seeds=1), other))
    heard: list[tuple[int, int]] = []
    first, second = reproduce(["all"], out=out, progress=lambda d, t, note="": heard.append((d, t))).outcomes
    assert [len(outcome.results) for outcome in (first, second)] == [1, 3]
    assert heard == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert replace(claim, seeds=2).seeds_of(1) == 1 and claim.seeds_of(5) == 5


def test_a_changed_experiment_is_measured_again_a_changed_judge_is_not(bench: Bench, out: Path) -> None:
    bench.write("rising")
    reproduce(["rising"], out=out, seeds=1)
    bench.ran()
    code = COUNTS.format(log=str(bench.log))
    bench.write("rising", code.replace("the values rise", "they fall").replace("values ==", "values !="))
    (outcome,) = reproduce(["rising"], out=out, seeds=1).outcomes
    assert bench.ran() == [] and outcome.verdict == "fails"
    bench.write("rising", code.replace("run.of(10, 1)", "run.of(20, 1)"))
    (outcome,) = reproduce(["rising"], out=out, seeds=1).outcomes
    assert bench.ran() == ["0 full"] and outcome.checks[0].measured == "[20]"


def test_what_is_kept_is_reported_and_nothing_runs(bench: Bench, out: Path) -> None:
    """Of seeds in a row from the first; an experiment that changed since says so."""
    bench.write("rising")
    bench.write("other")
    with pytest.raises(RequestError, match="holds no results of these claims at the full size"):
        kept(["all"], out=out)
    reproduce(["rising"], out=out)
    (out / "full" / "rising-1.json").unlink()
    bench.ran()
    report = kept(["all"], out=out)
    (outcome,) = report.outcomes
    assert [result.seed for result in outcome.results] == [0] and outcome.verdict == "holds"
    assert not outcome.changed and "Changed since" not in str(report)
    assert report.missing == ("other",) and "Not measured yet: other." in str(report)
    bench.write("rising", COUNTS.format(log=str(bench.log)).replace("run.of(10, 1)", "run.of(20, 1)"))
    report = kept(["rising"], out=out)
    assert report.outcomes[0].changed and report.outcomes[0].checks[0].measured == "[10]"
    assert "Changed since they were measured: rising." in str(report)
    assert run("rising", "--kept", "--out", out).stdout.startswith("claim ")
    assert bench.ran() == []


def test_a_result_that_cannot_be_read_is_measured_again(bench: Bench, out: Path) -> None:
    bench.write("rising")
    reproduce(["rising"], out=out, seeds=1)
    bench.ran()
    file = out / "full" / "rising-0.json"
    for damaged in (file.read_text()[:40], "{}", "[]"):
        file.write_text(damaged)
        reproduce(["rising"], out=out, seeds=1)
        assert bench.ran() == ["0 full"]
    assert [path.name for path in file.parent.iterdir()] == ["rising-0.json"]  # nothing half-written stays


def test_what_is_kept_says_where_and_when(bench: Bench, out: Path) -> None:
    bench.write("rising")
    reproduce(["rising"], out=out, seeds=1, threads=1)
    kept = json.loads((out / "full" / "rising-0.json").read_text())
    assert (kept["claim"], kept["seed"], kept["size"], kept["figures"]) == (
        "rising",
        0,
        "full",
        {"value": 10},
    )
    assert kept["versions"]["torch"] == torch.__version__ and kept["threads"] == 1
    assert kept["machine"]["cores"] >= 1 and len(kept["date"]) == 10 and kept["seconds"] > 0


FAILURES = {
    "raises": "def measure(run):\n    return {'a': [1, 2][run.seed + 2]}\n",
    "gives-nan": "def measure(run):\n    return {'a': [1.0, float('nan')]}\n",
    "does-not-compile": "def measure(run:\n",
    "judges-nothing": "def measure(run):\n    return {}\ndef judge(figures):\n    return ()\n",
    "judges-wrongly": "def measure(run):\n    return {}\ndef judge(figures):\n    return figures[0]['b']\n",
}
SAID = {
    "raises": "seed 0: IndexError: list index out of range",
    "gives-nan": "seed 0: figures['a'][1] is nan; a figure is a finite number, or None where there is none.",
    "does-not-compile": "seed 0: SyntaxError: '(' was never closed",
    "judges-nothing": "judging: There are no checks, so there is no verdict: judge at least one thing.",
    "judges-wrongly": "judging: KeyError: 'b'",
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_experiment_is_reported_and_the_others_go_on(bench: Bench, out: Path, name: str) -> None:
    bench.write(name, HEAD + JUDGE + FAILURES[name])
    bench.write("rising")
    report = reproduce(["all"], out=out)
    failed, fine = report.outcomes
    assert failed.error is not None and failed.error.startswith(SAID[name])
    assert report.failed and fine.verdict == "holds" and bench.ran() == ["0 full", "1 full", "2 full"]
    assert failed.verdict == f"not measured: {failed.error}" and failed.data()["verdict"] is None


def test_threads_and_random_state_of_torch_are_as_before(bench: Bench, out: Path) -> None:
    code = (
        "import torch\ndef measure(run):\n"
        "    return {'t': torch.get_num_threads(), 'r': torch.rand(()).item()}\n"
    )
    bench.write("looks", HEAD + code + JUDGE)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    threads = min(2, os.cpu_count() or 1)
    first, second = (reproduce(["looks"], out=out, again=True).outcomes[0] for _ in range(2))
    assert torch.get_num_threads() == 1 and torch.equal(torch.random.get_rng_state(), state)
    assert [result.figures["t"] for result in first.results] == [threads] * 3
    drawn = [[result.figures["r"] for result in outcome.results] for outcome in (first, second)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_progress_tells_what_is_at_work(bench: Bench, out: Path) -> None:
    code = "def measure(run):\n    run.progress(3, 1200, 'loss 2.000')\n    return {}\n"
    bench.write("told", HEAD + code + JUDGE)
    heard: list[tuple[int, int, str]] = []
    reproduce(["told"], out=out, seeds=2, progress=lambda d, t, note="": heard.append((d, t, note)))
    assert (1, 2, " runs; told, seed 1: 3 of 1,200 (loss 2.000)") in heard


def test_numbers_that_make_no_sense_are_refused_before_anything_runs(bench: Bench, out: Path) -> None:
    bench.write("rising")
    wrong: tuple[dict[str, Any], ...] = ({"seeds": 0}, {"threads": 0}, {"threads": 10_000})
    for given in wrong:
        with pytest.raises(RequestError, match="must be from 1 to"):
            reproduce(["rising"], out=out, **given)
    assert bench.ran() == []


def test_a_folder_that_cannot_be_written_is_said(bench: Bench, tmp_path: Path) -> None:
    bench.write("rising")
    (tmp_path / "file").write_text("")
    (outcome,) = reproduce(["rising"], out=tmp_path / "file", seeds=1).outcomes
    assert outcome.error is not None and "cannot be written" in outcome.error


def test_figures_come_back_as_json_gives_them() -> None:
    assert plain({"a": (1, 2.5, None, "x", True), "b": {"c": []}}) == {
        "a": [1, 2.5, None, "x", True],
        "b": {"c": []},
    }
    for odd, said in (
        ({"a": {1: 2}}, r"figures\['a'\] has the key 1;"),
        ({"a": torch.ones(1)}, "is a Tensor; figures are numbers, texts, lists and dicts"),
        ({"a": [float("inf")]}, r"figures\['a'\]\[0\] is inf"),
    ):
        with pytest.raises(RequestError, match=said):
            plain(odd)


# the command


def test_the_command_shows_a_table_and_ends_well_whatever_the_verdict(bench: Bench, out: Path) -> None:
    bench.write("rising", COUNTS.format(log=str(bench.log)).replace("values ==", "values !="))
    done = run("rising", "--out", out, "--seeds", 2)
    assert done.exit_code == 0
    assert "rising (X0)" in done.output and "fails" in done.output
    assert "no   the values rise: [10, 11]" in done.output


def test_the_command_ends_with_status_1_where_an_experiment_failed(bench: Bench, out: Path) -> None:
    bench.write("raises", HEAD + FAILURES["raises"] + JUDGE)
    bench.write("rising")
    done = run("all", "--out", out, "--smoke", "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert found["size"] == "smoke" and [each["verdict"] for each in found["claims"]] == [None, "holds"]


def test_the_command_writes_pages(bench: Bench, out: Path, tmp_path: Path) -> None:
    bench.write(
        "rising", COUNTS.format(log=str(bench.log)) + "def draw(f):\n    return {'line': '<svg></svg>'}\n"
    )
    done = run("X0", "--out", out, "--html", tmp_path / "a.html", "--markdown", tmp_path / "docs" / "b.md")
    assert done.exit_code == 0, done.output
    assert "<svg></svg>" in (tmp_path / "a.html").read_text()
    assert "![rising: line](b/rising-line.svg)" in (tmp_path / "docs" / "b.md").read_text()
    assert (tmp_path / "docs" / "b" / "rising-line.svg").read_text() == "<svg></svg>\n"


def test_the_command_needs_a_name_and_one_that_there_is() -> None:
    assert "name claims, or all" in run().output
    with pytest.raises(RequestError):
        CliRunner().invoke(cli.app, ["reproduce", "nothing"], catch_exceptions=False)


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    from qkv.claims.pages import write_markdown

    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot be written"):
        write_markdown(Report(()), tmp_path / "file" / "b.md")
