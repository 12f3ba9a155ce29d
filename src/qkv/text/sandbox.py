"""Chat templates run here: code from a model's files, which may be careless or hostile.

The sandbox of jinja2 keeps it from Python; what is added here keeps it from running or growing
without end. Work is counted where a template can repeat itself (loops and macros), and size where
it can make a large value from small ones.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from qkv.errors import TokenizerError

MAX_CHARACTERS = 1 << 24  # of a whole conversation, or of any value made on the way
MAX_SECONDS = 5.0

_DEADLINE: ContextVar[float] = ContextVar("deadline")

# What can only pad or fill, which no conversation needs.
_REMOVED_FILTERS = ("batch", "center", "format", "slice", "wordwrap")
_REMOVED_GLOBALS = ("cycler", "joiner", "lipsum")
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})

# A width of four digits, or one that is itself a value.
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*?(?:\d{4}|\*)")
_BRACE_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")


class Template:
    """A compiled chat template.

    Raises TokenizerError when it does not compile, when it refuses its input (with its own
    message), fails, or needs more than MAX_SECONDS or MAX_CHARACTERS.
    """

    def __init__(self, source: str, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        with _Failures("The chat template does not compile"):
            self._template = _Sandbox().from_string(source)

    def __call__(self, variables: Mapping[str, Any]) -> str:
        chunks, size = [], 0
        token = _DEADLINE.set(time.monotonic() + self._seconds)
        try:
            with _Failures("The chat template failed"):
                for chunk in self._template.generate(**variables):
                    size += len(chunk)
                    _check_size(size)
                    _check_time()
                    chunks.append(chunk)
        finally:
            _DEADLINE.reset(token)
        return "".join(chunks)


class _Refusal(jinja2.TemplateError):
    """What a template raises on purpose."""


class _Failures:
    """Turns whatever a template can raise into one sentence."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _Refusal):
            raise TokenizerError(f"The chat template refuses these messages: {error.message}") from error
        if isinstance(error, RecursionError):
            raise TokenizerError(f"{self._what}: it nests too deeply.") from error
        # A template can raise anything Python can; none of it is a fault of this library.
        if isinstance(error, Exception) and not isinstance(error, TokenizerError):
            raise TokenizerError(f"{self._what}: {error}") from error


def _check_time() -> None:
    if time.monotonic() > _DEADLINE.get(float("inf")):
        raise TokenizerError("The chat template takes too long: it was stopped.")


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TokenizerError(
            f"The chat template makes more than {MAX_CHARACTERS:,} characters: it was stopped."
        )


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.filters.update(tojson=_tojson, indent=_indent, join=_join, replace=_replace)
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace, dict=_dict
        )

    def tick(self) -> str:
        _check_time()
        return ""

    def joined(self, *values: Any) -> str:
        return self.concat(map(str, values))

    @staticmethod
    def concat(strings: Iterable[str]) -> str:
        strings = list(strings)
        _check_size(sum(map(len, strings)))
        return "".join(strings)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "**":
            _check_size(_bits(left) * abs(right))
        elif operator == "%" and isinstance(left, str):
            _check_format(_PERCENT_WIDTH, left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            given = [*args, *kwargs.values()]
            if method.__name__ in ("format", "format_map"):
                _check_format(_BRACE_WIDTH, owner)
            elif method.__name__ in _PADDING:
                for value in given:
                    _check_width(value)
            elif method.__name__ == "replace":
                _check_size(
                    len(owner) * max((len(value) for value in given if isinstance(value, str)), default=1)
                )
            elif method.__name__ == "join" and hasattr(args[0], "__len__"):
                _check_size(len(owner) * len(args[0]))
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counted().visit(super()._parse(source, name, filename))


class _Counted(NodeTransformer):
    """Puts a check of the time in every loop and macro, and one of the size at every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._call("tick", [], node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
        return node

    def _call(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        # By an attribute of the environment, which no template can assign to.
        function = nodes.EnvironmentAttribute(method, lineno=line)
        return nodes.Call(function, arguments, [], None, None, lineno=line)


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


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object = "no reason given") -> None:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format[:1000])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which models were not trained on.
    _check_width(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(width)
    return filters.do_indent(text, width, first, blank)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, values: Any, d: str = "", attribute: str | int | None = None) -> str:
    values = list(values)
    _check_size(len(values) * (len(str(d)) + 1))
    text = filters.do_join(context, values, d, attribute)
    _check_size(len(text))
    return text


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, text: str, old: str, new: str, count: int | None = None) -> str:
    _check_size(len(str(text)) * max(len(str(new)), 1))
    return filters.do_replace(context, text, old, new, count)


def _check_product(value: Any, times: Any) -> None:
    if isinstance(times, int):
        _check_size((len(value) if hasattr(value, "__len__") else _bits(value)) * abs(times))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def _check_width(width: Any) -> None:
    if (isinstance(width, int) and width > 1000) or (isinstance(width, str) and len(width) > 1000):
        raise TokenizerError("The chat template asks for a width of more than 1,000 characters.")


def _check_format(width: re.Pattern[str], text: str) -> None:
    if width.search(text):
        raise TokenizerError("The chat template formats with a width that is not a small number.")
