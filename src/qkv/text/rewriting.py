"""What is changed in a chat template before it is compiled.

Only the parts of the language listed here pass. Control texts in its literals are sealed, every
operation whose cost depends on its values goes through a function of the environment that charges
for it, and nothing is left that the compiler would work out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from qkv.errors import TokenizerError
from qkv.text.budget import check_number
from qkv.text.scaffold import Seals, holds_surrogates

# Roles that templates turn into control text ('<|' + role + '|>'). Any other is a string like the rest.
ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})

_KNOWN = """
    Add And Assign AssignBlock Break Call CallBlock Compare Concat CondExpr Const Continue Dict Div
    Filter FilterBlock FloorDiv For Getattr Getitem If Keyword List Macro Mod Mul NSRef Name Neg Not
    Operand Or Output Pair Pos Pow Scope Slice Sub Template TemplateData Test Tuple With
"""
_PARTS = frozenset(_KNOWN.split())


class Role(str):
    """A known role: text that may become part of a control text which the template writes."""

    __slots__ = ()


class Rewriting(NodeTransformer):
    def __init__(self, seals: Seals) -> None:
        self._seals = seals
        self.words: set[str] = set()  # all literals and attributes

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if (name := type(node).__name__) not in _PARTS:
            raise TokenizerError(f"The chat template uses {name.lower()}, which none may here.")
        return super().visit(node, *args, **kwargs)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._sealed(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        check_number(node.value)
        if not isinstance(node.value, str):
            return node
        if node.value in ROLES:
            roles = nodes.EnvironmentAttribute("roles", lineno=node.lineno)
            return nodes.Getitem(roles, node, "load", lineno=node.lineno)
        return nodes.Const(self._sealed(node.value), lineno=node.lineno)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        self.words.add(node.attr)
        return self.generic_visit(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        if all(isinstance(child, nodes.TemplateData) for child in node.nodes):
            self.generic_visit(node)
        else:
            node.nodes = [self._joining("joined", node.nodes, node.lineno)]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        return self._joining("joined", node.nodes, node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """a + b + c as one sum, so that '<|' + role + '|>' is seen whole wherever it stands in it."""
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        return self._joining("added", [left, *reversed(terms)], node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._call("walked", [node.expr], node.lineno)
        for operand in node.ops:
            operand.expr = self._call("walked", [operand.expr], node.lineno)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._call("walked", [node.key], node.lineno)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._made(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._made(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._ticking(node)
        if node.test is not None:
            node.test = self._call("walked", [node.test], node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", [node], node.lineno)

    def _joining(self, method: str, terms: Sequence[nodes.Node], line: int) -> nodes.Expr:
        """A call that knows which of its terms are literals of the template: "o" for own, "v" for a value."""
        kinds, arguments = [], []
        for term in terms:
            text = term.data if isinstance(term, nodes.TemplateData) else getattr(term, "value", None)
            if isinstance(term, (nodes.TemplateData, nodes.Const)) and isinstance(text, str):
                kinds.append("o")
                arguments.append(nodes.Const(self._sealed(text), lineno=line))
            else:
                kinds.append("v")
                arguments.append(self.visit(term))
        return self._call(method, [nodes.Const("".join(kinds)), *arguments], line)

    def _sealed(self, text: str) -> str:
        if holds_surrogates(text):
            raise TokenizerError("The chat template holds a lone surrogate, which is no Unicode.")
        self.words.add(text)
        return self._seals.sealed(text)

    def _call(self, method: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Call:
        # By an attribute of the environment, which no template can assign to. A call is also what
        # keeps the compiler from working out a constant expression while it compiles.
        function = nodes.EnvironmentAttribute(method, lineno=line)
        return nodes.Call(function, list(arguments), [], None, None, lineno=line)
