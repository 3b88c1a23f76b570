"""Mutants of a module's functions, made on its syntax tree: small changes of what the code decides.

A message is no decision: texts with blanks, log lines, what ``print`` and ``echo`` write, docstrings, annotations,
decorators, assertions, names of tasks, and helps of metrics and options are left alone. ``raise`` may be deleted, its
text stays.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import CodeType

_Node = TypeVar("_Node", bound=ast.AST)
_Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
_WRITERS = frozenset({"print", "echo", "secho", "getLogger", "cast", "TypeVar", "NewType", "assert_never"})
_MESSAGE_KEYWORDS = frozenset({"help", "description", "documentation", "message", "msg", "detail", "doc", "strict"})
# Their order of arguments changes nothing, or stops any program that runs them.
_ANY_ORDER = frozenset({"min", "max", "zip", "isclose", "isinstance", "issubclass", "getattr", "setattr", "hasattr"})
_TEXTS_ONLY = frozenset({"__repr__", "__str__", "__init_subclass__"})
_IDENTIFIER = re.compile(r"[\w./:%=@+-]+")
# What is shown of a change: the statement, or as much around the change as fits.
_SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function.

    Args:
        path: The module's file, from the root.
        function: ``module.function`` or ``module.Class.method``.
        before: The statement, or the part of it that changes, as ``ast.unparse`` writes it.
        after: The same, changed.
        lines: First and last line of the statement, or of its head.
        identity: A hash of the function's text and of which of its changes this is; comments do not change it.
    """

    path: str
    function: str
    before: str
    after: str
    lines: tuple[int, int]
    identity: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the list of equivalent mutants names it by."""
        return self.function, self.before, self.after


@dataclass(frozen=True, slots=True)
class _Change:
    """Puts another node in a node's place; ``shown`` stands for it in reports."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    shown: ast.AST

    def put(self, node: ast.AST) -> None:
        """Puts a node there."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def get(self) -> ast.AST:
        """Gets what is there."""
        found = getattr(self.parent, self.field)
        node: ast.AST = found if self.index is None else found[self.index]
        return node


class MutatedModule:
    """The mutants of one file.

    Args:
        root: The repository.
        path: The file, from the root.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self.file = root / path
        self._tree = ast.parse(self.file.read_text())
        self._changes: dict[str, tuple[_Change, str, int]] = {}

    @cached_property
    def mutants(self) -> list[Mutant]:
        """All mutants, in the order of the file."""
        return [mutant for name, function in _list_functions(self._tree) for mutant in self._mutate(name, function)]

    def compile(self, identity: str) -> tuple[CodeType, CodeType] | None:
        """Compiles a mutant.

        Returns:
            The function's code as it is, and changed; None where both are the same.
        """
        _ = self.mutants
        change, name, line = self._changes[identity]
        before = _find_code(self._code, name, line)
        original = change.get()
        change.put(change.node)
        try:
            after = _find_code(compile(self._tree, str(self.file), "exec", dont_inherit=True), name, line)
        finally:
            change.put(original)
        return None if before == after or before.co_freevars != after.co_freevars else (before, after)

    @cached_property
    def _code(self) -> CodeType:
        return compile(self._tree, str(self.file), "exec", dont_inherit=True)

    def _mutate(self, name: str, function: _Function) -> Iterator[Mutant]:
        stem = self.path.rpartition("/")[2].removesuffix(".py")
        text = ast.unparse(function)
        line = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        for number, (change, chain) in enumerate(_list_changes(function)):
            identity = hashlib.sha256(f"{self.path}:{name}:{number}:{text}".encode()).hexdigest()[:16]
            self._changes[identity] = change, name, line
            before, after = _show(change, chain)
            yield Mutant(self.path, f"{stem}.{name}", before, after, _get_lines(chain[0]), identity)


def _list_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Function]]:
    """Lists functions and methods; what is defined within a function is part of it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _list_functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, _Function):
            if node.name not in _TEXTS_ONLY:
                yield prefix + node.name, node
        elif isinstance(node, ast.If | ast.Try):
            yield from _list_functions(node, prefix)


def _find_code(code: CodeType, name: str, line: int) -> CodeType:
    pending = [code]
    while pending:
        code = pending.pop()
        if code.co_qualname == name and code.co_firstlineno == line:
            return code
        pending += [each for each in code.co_consts if isinstance(each, type(code))]
    raise LookupError(f"{name}, line {line}: no such code")


def _list_changes(function: _Function) -> Iterator[tuple[_Change, list[ast.AST]]]:
    """Lists changes, each with the nodes from its statement down to what changes."""
    is_predicate = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    start = 1 if ast.get_docstring(function, clean=False) is not None else 0
    for index in range(start, len(function.body)):
        yield from _walk(function, "body", index, [], is_predicate=is_predicate)


def _walk(
    parent: ast.AST, field: str, index: int | None, chain: list[ast.AST], *, is_predicate: bool
) -> Iterator[tuple[_Change, list[ast.AST]]]:
    value = getattr(parent, field)
    node = value if index is None else value[index]
    if _is_message(node):
        return
    is_head = isinstance(node, ast.stmt | ast.match_case | ast.ExceptHandler)
    chain = [node] if is_head else [*chain, node]
    for new, shown in _list_replacements(parent, field, node, is_predicate=is_predicate):
        yield _Change(parent, field, index, new, shown), chain
    is_within_raise = isinstance(chain[0], ast.Raise)
    for name, child in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "format_spec", "ctx", "type_params", "type"}:
            continue
        if isinstance(child, list):
            for position, each in enumerate(child):
                if isinstance(each, ast.AST) and not (is_within_raise and _is_text(each)) and not _is_name(node, each):
                    yield from _walk(node, name, position, chain, is_predicate=is_predicate)
        elif isinstance(child, ast.AST) and not isinstance(child, ast.arguments):
            yield from _walk(node, name, None, chain, is_predicate=is_predicate)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_name(node: ast.AST, keyword: ast.AST) -> bool:
    """Whether a keyword gives a task its name."""
    is_task = isinstance(node, ast.Call) and _get_name(node.func) == "create_task"
    return is_task and isinstance(keyword, ast.keyword) and keyword.arg == "name"


def _is_message(node: ast.AST) -> bool:
    """Whether a node decides nothing: it writes for people, or says what is always true."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
            found = True
        case ast.Delete(targets=targets):
            found = all(isinstance(target, ast.Name) for target in targets)  # it says what is not used
        case ast.Constant(value=str() as text):
            found = _IDENTIFIER.fullmatch(text) is None
        case ast.JoinedStr(values=values):
            found = any(isinstance(part, ast.Constant) and re.search(r"\s", str(part.value)) for part in values)
        case ast.keyword(arg=name):
            found = name in _MESSAGE_KEYWORDS
        case ast.Expr(value=value) | ast.Await(value=value):
            found = _is_message(value)
        case ast.If(body=body, orelse=[]):
            found = all(isinstance(each, ast.Expr) and _is_message(each) for each in body)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _LOG_METHODS:
            found = "log" in ast.unparse(value).lower()
        case ast.Call(func=function):
            found = _get_name(function) in _WRITERS
        case _:
            found = False
    return found


def _get_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _list_replacements(
    parent: ast.AST, field: str, node: ast.AST, *, is_predicate: bool
) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Lists what may stand in a node's place: the node that runs, and the one that is shown."""
    if isinstance(node, ast.stmt):
        yield from _replace_statement(node, is_predicate=is_predicate)
    elif isinstance(node, ast.expr):
        if field in {"test", "guard", "ifs"} and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield _twice(ast.UnaryOp(ast.Not(), node))
        if not isinstance(parent, ast.JoinedStr):
            for new in _replace_expression(node):
                yield _twice(ast.copy_location(new, node))


def _twice(node: ast.AST) -> tuple[ast.AST, ast.AST]:
    node = ast.fix_missing_locations(node)
    return node, node


def _replace_statement(node: ast.stmt, *, is_predicate: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    if _is_deleted(node):
        # What never runs still tells the compiler which names are whose.
        never = ast.copy_location(ast.If(ast.Constant(value=False), [node], []), node)
        yield ast.fix_missing_locations(never), ast.Pass()
    elif isinstance(node, ast.Continue):
        yield _twice(ast.copy_location(ast.Break(), node))
    elif isinstance(node, ast.AugAssign) and type(node.op) in _CALCULATED:
        yield _twice(_change(node, op=_CALCULATED[type(node.op)]()))
    elif isinstance(node, ast.Return) and node.value is not None:
        value = node.value
        if is_predicate and not isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield _twice(_change(node, value=ast.copy_location(ast.UnaryOp(ast.Not(), value), value)))
        elif not is_predicate and not (isinstance(value, ast.Constant) and value.value is None):
            nothing = ast.copy_location(ast.IfExp(ast.Constant(value=True), ast.Constant(value=None), value), value)
            yield _change(node, value=nothing), ast.Return(ast.Constant(value=None))


def _is_deleted(node: ast.stmt) -> bool:
    """Whether a mutant leaves a statement out: calls, refusals, and what changes the state of an object."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.Expr(value=ast.Await(value=ast.Call())):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Delete() | ast.Break():
            return True
        case ast.Raise(exc=error):
            return error is None or "NotImplementedError" not in ast.unparse(error)
    return False


def _replace_expression(node: ast.expr) -> Iterator[ast.AST]:  # noqa: C901 - one case per kind of node
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                changed = [*operators[:index], _COMPARED[type(operator)](), *operators[index + 1 :]]
                yield _change(node, ops=changed)
        case ast.BoolOp(values=values):
            for index in range(len(values)):
                kept = [*values[:index], *values[index + 1 :]]
                yield kept[0] if len(kept) == 1 else _change(node, values=kept)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(op=operator) if type(operator) in _CALCULATED and not (
            _is_text(node.left) or _is_text(node.right)
        ):
            yield _change(node, op=_CALCULATED[type(operator)]())
        case ast.Constant(value=value):
            if (new := _change_constant(value)) is not None:
                yield _change(node, value=new)
        case ast.Yield(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Yield(ast.Constant(value=None))
        case ast.Call():
            yield from _replace_call(node)


def _change_constant(value: object) -> object:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 2 or 1.0
        case str():
            return f"XX{value}"
        case bytes():
            return b"XX" + value
    return None


def _replace_call(node: ast.Call) -> Iterator[ast.AST]:
    name = _get_name(node.func)
    if isinstance(node.func, ast.Name) and name in _CALLED:
        yield _change(node, func=ast.copy_location(ast.Name(_CALLED[name], ast.Load()), node.func))
    if name not in _ANY_ORDER:
        for index, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if not isinstance(one, ast.Constant | ast.Starred) and not isinstance(other, ast.Constant | ast.Starred):
                yield _change(node, args=[*node.args[:index], other, one, *node.args[index + 2 :]])
    # A record or an error without one of its fields fails wherever it is made.
    if not name[:1].isupper():
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None and not _is_message(keyword) and not _is_name(node, keyword):
                yield _change(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]])


def _change(node: _Node, **fields: object) -> _Node:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return ast.fix_missing_locations(new)


def _show(change: _Change, chain: list[ast.AST]) -> tuple[str, str]:
    """Writes the largest part around the change that is short enough, as it is and changed."""
    original = change.get()
    for node in chain[:-1]:
        before = _unparse(node)
        change.put(change.shown)
        after = _unparse(node)
        change.put(original)
        if max(len(before), len(after)) <= _SHOWN_CHARACTERS:
            return before, after
    return _unparse(original), _unparse(change.shown)


def _unparse(node: ast.AST) -> str:
    """Writes a statement without its body, or an expression."""
    if isinstance(node, ast.stmt | ast.match_case | ast.ExceptHandler) and hasattr(node, "body"):
        head = copy.copy(node)
        head.body = []
        for field in ("orelse", "handlers", "finalbody", "cases", "decorator_list"):
            if hasattr(head, field):
                setattr(head, field, [])
        node = head
    return ast.unparse(node).strip()


def _get_lines(node: ast.AST) -> tuple[int, int]:
    """Gets the lines of a statement, of its head where it has a body."""
    first = getattr(node, "lineno", 0)
    body = getattr(node, "body", None)
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, max(node.pattern.lineno, node.body[0].lineno - 1)
    if isinstance(node, ast.Match):
        return first, node.cases[0].pattern.lineno - 1
    if isinstance(body, list) and body:
        return first, max(first, body[0].lineno - 1)
    return first, getattr(node, "end_lineno", first)
