"""Chat templates run here: code from a model's files, which may be careless or hostile.

The sandbox of jinja2 keeps it from Python; what is added here keeps it from running or growing
without end, and its control texts apart from those of the messages. Filters, tests, globals and
methods are those that chat templates use, each at a bounded cost; there are no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from inspect import isgenerator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from qkv.errors import TokenizerError
from qkv.text import operations
from qkv.text.budget import (
    BUDGET,
    MAX_SECONDS,
    VIEWS,
    Budget,
    check_size,
    length,
    spend,
    spend_deep,
    spend_shallow,
)
from qkv.text.rewriting import ROLES, Rewriting, Role
from qkv.text.scaffold import Seals, holds_surrogates

MAX_SOURCE = 1 << 16  # characters of a template; the longest published ones have a third of it


class Template:
    """A compiled chat template.

    Raises TokenizerError when it does not compile, when it refuses its input (with its own
    message), fails, or needs more than `seconds` or what `budget` allows. Its control texts come
    out as the characters of `seals`. `words` are its literals and the attributes it reads.
    """

    def __init__(self, source: str, seconds: float = MAX_SECONDS, seals: Seals | None = None) -> None:
        self._seconds = seconds
        self._seals = seals or Seals({})
        if len(source) > MAX_SOURCE:
            raise TokenizerError(
                f"The chat template has {len(source):,} characters; {MAX_SOURCE:,} are the most."
            )
        if holds_surrogates(source):
            raise TokenizerError("The chat template holds a lone surrogate, which is no Unicode.")
        with _Failures("The chat template does not compile", self._seals):
            sandbox = _Sandbox(self._seals)
            self._template = sandbox.from_string(source)
        self.words = frozenset(sandbox.words)

    def __call__(self, variables: Mapping[str, Any]) -> str:
        chunks, size = [], 0
        token = BUDGET.set(Budget(self._seconds))
        try:
            with _Failures("The chat template failed", self._seals):
                for chunk in self._template.generate(**variables):
                    size += len(chunk)
                    check_size(size)
                    spend_shallow(chunk)
                    chunks.append(chunk)
        finally:
            BUDGET.reset(token)
        return "".join(chunks)


class _Refusal(jinja2.TemplateError):
    """What a template raises on purpose."""


class _Failures:
    """Turns whatever a template can raise into one sentence."""

    def __init__(self, what: str, seals: Seals) -> None:
        self._what = what
        self._seals = seals

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _Refusal):
            message = self._seals.readable(str(error.message))
            raise TokenizerError(f"The chat template refuses these messages: {message}") from error
        if isinstance(error, RecursionError):
            raise TokenizerError(f"{self._what}: it nests too deeply.") from error
        # A template can raise anything Python can; none of it is a fault of this library.
        if isinstance(error, Exception) and not isinstance(error, TokenizerError):
            raise TokenizerError(f"{self._what}: {self._seals.readable(str(error))}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])
    roles: Mapping[str, Role] = {role: Role(role) for role in ROLES}

    def __init__(self, seals: Seals) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # it would calculate before there is a budget
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._seals = seals
        self.words: set[str] = set()
        self.filters = operations.filters(self.text)
        self.tests = operations.tests(self.text)
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": _Namespace,
            "raise_exception": self._raising(),
            "strftime_now": _strftime_now,
        }
        self._callable = tuple(self.globals.values())

    def text(self, value: Any) -> str:
        """What a value prints as. A seal inside a list or an object is opened: Python would escape it."""
        if isinstance(value, str):
            return value
        spend_deep(value)
        return str(self._opened(value))

    def tick(self) -> str:
        spend()
        return ""

    def made(self, value: Any) -> Any:
        spend_shallow(value)
        return value

    def walked(self, value: Any) -> Any:
        """A value that is about to be compared or looked up, which costs as much as it holds."""
        if isinstance(value, (str, int, float)):
            spend(0, seen=length(value))
        else:
            spend_deep(value)
        return value

    def joined(self, kinds: str, *values: Any) -> str:
        """The values as one text. Literals side by side, with known roles between them, are the template's
        own text, and a control text that they form together is sealed."""
        pieces, own = [], []
        for kind, value in zip(kinds, values, strict=True):
            if kind == "o" or isinstance(value, Role):
                own.append(str(value))
                continue
            pieces += [self._own(own), self.text(value)]
            own = []
        pieces.append(self._own(own))
        return self.concat(pieces)

    def added(self, kinds: str, *values: Any) -> Any:
        if all(type(value) in (str, Role) for value in values):
            return self.joined(kinds, *values)
        total = values[0]
        for value in values[1:]:
            total = operations.arithmetic("+", total, value)
        return total

    @staticmethod
    def concat(strings: Iterable[str]) -> str:
        strings = list(strings)
        size = sum(map(len, strings))
        check_size(size)
        spend(size)
        return "".join(strings)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            spend_deep(right)
            return operations.percent(left, self._opened_inside(right))
        return operations.arithmetic(operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int)):
            spend_deep(argument)
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if owner is self:  # what Rewriting put there
            return obj(*args)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        given = {key: value for key, value in kwargs.items() if not key.startswith("_")}
        if isinstance(owner, (str, dict, list, tuple)):
            args = tuple(list(value) if isgenerator(value) else value for value in args)
            operations.allow_method(owner, obj.__name__, args, given)
            if isinstance(owner, str) and obj.__name__ != "join":  # it joins strings only
                args = tuple(map(self._opened_inside, args))
                kwargs |= {key: self._opened_inside(value) for key, value in given.items()}
        elif not (
            isinstance(obj, (Macro, LoopContext, Undefined))
            or isinstance(owner, LoopContext)
            or any(obj is known for known in self._callable)
        ):
            raise TokenizerError("The chat template calls what is no function for templates.")
        elif not isinstance(obj, Macro):
            spend_deep(*args, *given.values())
        result = super().call(context, obj, *args, **kwargs)
        # What a dict or a list gives was charged when it was made.
        if not isinstance(owner, (dict, list, tuple)) or obj.__name__ == "copy":
            spend_shallow(result)
        if isinstance(owner, Role) and obj.__name__ in operations.RECASING and not args:
            return Role(result)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        rewriting = Rewriting(self._seals)
        template = rewriting.visit(super()._parse(source, name, filename))
        self.words |= rewriting.words
        return template

    def _raising(self) -> Callable[..., None]:
        def raise_exception(message: object = "no reason given") -> None:
            raise _Refusal(self.text(message))

        return raise_exception

    def _own(self, pieces: list[str]) -> str:
        # One literal by itself was sealed when the template was compiled.
        return self._seals.sealed("".join(pieces)) if pieces else ""

    def _opened(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._seals.opened(value)
        if isinstance(value, dict):
            return {self._opened(key): self._opened(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._opened(item) for item in value]
        if isinstance(value, tuple):
            return tuple(map(self._opened, value))
        if isinstance(value, VIEWS):
            mapping = self._opened(dict(value.mapping))
            return (mapping.keys(), mapping.values(), mapping.items())[VIEWS.index(type(value))]
        if value is None or isinstance(value, (int, float, complex, range, Undefined)):
            return value
        raise TokenizerError(f"The chat template prints a {type(value).__name__}, which is no text.")

    def _opened_inside(self, value: Any) -> Any:
        """For arguments that may be printed: a string as it is, what a list or object holds opened."""
        if isinstance(value, tuple):
            return tuple(map(self._opened_inside, value))
        return value if isinstance(value, str) else self._opened(value)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says, for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as it is

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace without the names that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise _Refusal(f"a namespace holds no name such as {name}.")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])
