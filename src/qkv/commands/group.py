"""What all commands hang on, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

import qkv
from qkv.console import notes
from qkv.errors import SourceError


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from qkv.runtime.built import status

        click.echo(f"qkv {qkv.__version__}, {status()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["--help", "-h"]})
@click.option(
    "--version", is_flag=True, is_eager=True, callback=_version, help="Show the version and runtime."
)
def app(version: bool) -> None:
    """Read, run, size and explain Transformers on your own machine."""


def command(*examples: str, note: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """A command whose help ends with examples, each on a line of its own."""
    lines = "\n".join(("\b", "Examples:", *(f"  {example}" for example in examples)))
    return app.command(epilog=f"{note}\n\n{lines}")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise SourceError(f"{path} cannot be written: {problem.strerror}.") from None
    notes().print(f"wrote {path}")
