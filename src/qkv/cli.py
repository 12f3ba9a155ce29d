"""The command line: one command a verb."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

import click

from qkv.commands import measuring, reading, texts
from qkv.commands.group import app
from qkv.console import notes
from qkv.errors import QkvError, RequestError

__all__ = ["app", "main", "measuring", "reading", "texts"]


def main() -> None:
    """Runs the command; an error is one sentence and exit status 1, or 2 for a wrong request."""
    # torch's threads spin while they wait: beside another busy process that makes both many times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        with app.make_context("qkv", sys.argv[1:] or ["--help"]) as context:
            app.invoke(context)  # not app(): that answers Ctrl-C with a line break
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.UsageError as problem:
        _fail(_sentence(problem.format_message()), 2)
    except QkvError as problem:
        _fail(str(problem), 2 if isinstance(problem, RequestError) else 1)
    except UnicodeDecodeError:
        _fail("Standard input is not UTF-8 text.", 2)
    except BrokenPipeError:  # who read the output has left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as problem:
        _fail(f"{problem.strerror or problem}.", 1)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(0)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", ".)", "?)")) else f"{text}."


def _fail(sentence: str, status: int) -> None:
    notes().print("qkv: ", style="bold red", end="")
    notes().print(sentence)
    sys.exit(status)


if __name__ == "__main__":
    main()
