"""What commands are given, read as the library takes it."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner

from qkv.options import loading, sampling


def read(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @sampling
    @loading
    def command(**given: Any) -> None:
        found.update(given)

    done = CliRunner().invoke(command, arguments)
    if done.exit_code:
        raise click.UsageError(done.output)
    return found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1000", 1000),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5k", 1500),
        ("7b", 7),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, count: int) -> None:
    assert read("--cache", text)["how"]["cache"] == count


@pytest.mark.parametrize("text", ["", "GiB", "2 GiB more", "-1", "2PiB", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="is no size, such as 500MB or 2GiB"):
        read("--cache", text)


def test_how_a_model_is_loaded_is_one_argument() -> None:
    given = read("--kv", "int8", "--threads", "2", "--ignore", "a", "--speculate", "ngram", "--seed", "3")
    assert given["how"] == {
        "runtime": None,
        "dtype": None,
        "device": "cpu",
        "threads": 2,
        "kv": "int8",
        "cache": None,
        "compress": None,
        "ignore": ("a",),
    }
    assert given["speculate"] == "ngram" and given["seed"] == 3 and "kv" not in given
