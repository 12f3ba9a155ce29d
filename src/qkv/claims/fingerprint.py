"""What a measurement depends on, as one short text: a changed experiment is to be run again.

Counted is the code that `measure` reaches within `qkv.claims`: functions, classes and constants of its
module and of those it takes names from. Comments, docstrings, annotations, `judge`, `draw` and what others
add to a shared module do not count, so that a better picture costs no hours. Nor do the rest of qkv and
`Run`, which an experiment only names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from qkv.errors import SourceError

PACKAGE = "qkv.claims"
Place = tuple[str, str]  # module, name


def fingerprint(module: str, name: str = "measure") -> str:
    """Sixteen hexadecimal digits of what this function of this module reaches.

    Raises SourceError where the module has no such name.
    """
    if name not in _definitions(module):
        raise SourceError(f"{module} does not define {name}.")
    seen: set[Place] = set()
    waiting: list[Place] = [(module, name)]
    while waiting:
        place = waiting.pop()
        if place not in seen:
            seen.add(place)
            waiting += _reached(*place)
    parts = [f"{module}.{name}: {_said(module, name)}" for module, name in sorted(seen)]
    return sha256("\n".join(parts).encode()).hexdigest()[:16]


def _said(module: str, name: str) -> str:
    return "; ".join(ast.dump(statement) for statement in _definitions(module).get(name, ()))


def _reached(module: str, name: str) -> Iterator[Place]:
    """What of the package the definition of a name uses."""
    own, taken = _definitions(module), _imports(module)
    for statement in own.get(name, ()):
        for part in ast.walk(statement):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                whole = ".".join(filter(None, taken.get(part.value.id, ("", ""))))
                if _is_ours(whole) and part.attr in _definitions(whole):  # tasks.copying
                    yield whole, part.attr
            elif isinstance(part, ast.Name) and part.id in own:
                yield module, part.id
            elif isinstance(part, ast.Name) and part.id in taken:
                source, original = taken[part.id]
                if original in _definitions(source):
                    yield source, original


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise SourceError(f"There is no module {module}.")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for part in ast.walk(tree):
        if (
            isinstance(part, ast.Module | ast.FunctionDef | ast.ClassDef)
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:] or [ast.Pass()]
        if isinstance(part, ast.FunctionDef):
            part.returns = None
        elif isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.AnnAssign):
            part.annotation = ast.Constant(None)
    return tree


@cache
def _definitions(module: str) -> dict[str, list[ast.stmt]]:
    """Top-level functions, classes and constants by name; imports are no definitions."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in _tree(module).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for part in ast.walk(statement):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found.setdefault(part.id, []).append(statement)
    return found


@cache
def _imports(module: str) -> dict[str, Place]:
    """Names taken from the package anywhere in a module, and where from."""
    found = {}
    for part in ast.walk(_tree(module)):
        if isinstance(part, ast.ImportFrom) and part.module and part.module.startswith(PACKAGE):
            for alias in part.names:
                found[alias.asname or alias.name] = (part.module, alias.name)
    return found


@cache
def _is_ours(module: str) -> bool:
    if not module.startswith(f"{PACKAGE}."):
        return False
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a name in a module, not a module
        return False
