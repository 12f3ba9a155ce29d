"""The lines between the harness and a worker, with an engine that computes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.peers.protocol import Refused, Request, Timing, answer, rates
from benchmarks.workers import Worker, WorkerFailed, commands

REQUEST = {"gguf": "/m/a.gguf", "folder": "/m/a", "type": "Q8_0", "threads": 2}
ECHO = """
import sys
sys.path.insert(0, {peers!r})
from protocol import Timing, serve
class Echo:
    name = "echo 1"
    def prepare(self, request): print("a library that prints")
    def load(self, request): return request.type
    def run(self, prompts, new):
        if new > 9: sys.exit(3)
        return Timing(2.0, 0.5, [[p[0]] * new for p in prompts])
serve(Echo())
"""


class Fake:
    name = "fake 1"

    def prepare(self, request: Request) -> None:
        raise Refused("it has no 4-bit weights.")

    def load(self, request: Request) -> str:
        return f"{request.gguf.name} on {request.threads}"

    def run(self, prompts, new):
        raise ZeroDivisionError("over\nand out")


def test_rates_count_all_streams_and_leave_each_first_token_to_prefill() -> None:
    timing = Timing(2.0, 0.5, [[1, 2, 3], [4, 5, 6]])
    found = rates([[7] * 100, [8] * 100], timing)
    assert (found["prefill_tokens_per_s"], found["decode_tokens_per_s"]) == (100.0, 8.0)
    assert found["tokens"] == [[1, 2, 3], [4, 5, 6]]


def test_tokens_made_while_others_still_read_are_not_decoding() -> None:
    assert rates([[7], [8]], Timing(1.0, 0.5, [[1, 2, 3], [4, 5]], early=1))["decode_tokens_per_s"] == 4.0


def test_one_new_token_has_no_decoding_speed() -> None:
    assert rates([[7] * 8], Timing(2.0, 0.0, [[1]]))["decode_tokens_per_s"] is None


def test_what_an_engine_refuses_or_fails_at_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(Fake(), {"do": "prepare", **REQUEST}) == {"error": "it has no 4-bit weights."}
    assert answer(Fake(), {"do": "load", **REQUEST}) == {"format": "a.gguf on 2", "engine": "fake 1"}
    failed = answer(Fake(), {"do": "prefill_decode", "prompts": [[1]], "new": 1})
    assert failed == {"error": "ZeroDivisionError: over"}
    assert "over" in capsys.readouterr().err  # the whole of it is in the worker's log
    assert "'fly' is not known" in answer(Fake(), {"do": "fly"})["error"]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "echo.py"
    peers = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
    script.write_text(ECHO.format(peers=str(peers)))
    return [sys.executable, str(script)]


def test_a_process_answers_line_by_line_whatever_its_libraries_print(
    command: list[str], tmp_path: Path
) -> None:
    with Worker(command, tmp_path / "log", threads=1) as worker:
        assert worker.ask(do="prepare", **REQUEST) == {}
        assert worker.ask(do="load", **REQUEST) == {"format": "Q8_0", "engine": "echo 1"}
        answered = worker.ask(do="prefill_decode", prompts=[[5, 6], [7, 8]], new=2)
        assert answered["tokens"] == [[5, 5], [7, 7]]
        assert answered["prefill_tokens_per_s"] == 2.0
    assert worker.process.returncode == 0
    assert "a library that prints" in (tmp_path / "log").read_text()


def test_a_process_that_ends_is_an_error_now_and_later(command: list[str], tmp_path: Path) -> None:
    with Worker(command, tmp_path / "log", threads=1) as worker:
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="ended with status 3"):
                worker.ask(do="prefill_decode", prompts=[[5]], new=10)
        assert not worker.alive


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        Worker(command, tmp_path / "log", threads=1, longest=0.2) as worker,
        pytest.raises(WorkerFailed, match="no answer"),
    ):
        worker.ask(do="load", **REQUEST)
    assert worker.process.returncode == -9


def test_an_extra_engine_is_a_name_and_a_command() -> None:
    found = commands(["mine=python3 'my worker.py' --fast=1"])
    assert found["mine"] == ["python3", "my worker.py", "--fast=1"]
    assert next(iter(found)) == "qkv"


def test_a_request_is_read_from_a_message_with_more_in_it() -> None:
    read = Request.read({"do": "load", **REQUEST})
    assert read == Request(Path("/m/a.gguf"), Path("/m/a"), "Q8_0", 2)
