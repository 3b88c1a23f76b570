"""Who changes the router's state: the code of the package is read, and held against ``state.OWNERS``."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sluice_router
from sluice_router.scheduling import entities, state

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(sluice_router.__file__).parent
PARTS = (state.RequestQueues, state.EnginePool, state.ActivePlan, state.RouterStatus, state.RequestStatistics)
IO = (state.RouterOutbox, state.Actions)
ENTITIES = (
    entities.LiveRequest,
    entities.Submission,
    entities.PendingResume,
    entities.Migration,
    entities.ConnectedEngine,
    entities.EngineEndpoint,
)
RECORDS = (*PARTS, *IO, *ENTITIES)
CLASSES = {record.__name__: record for record in RECORDS}
FIELDS = frozenset(field.name for record in RECORDS for field in dataclasses.fields(record))
# Methods that change what they are called on: of containers and counters, and of the engine table.
CHANGING_CALLS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"}
    | {"record", "remove", "setdefault", "update"}
)
TABLE_CALLS = frozenset(
    {"cancel_placement", "configure", "mark_submitted", "observe_iteration", "report"}
    | {"record_grant_answer", "record_grant_request"}
)
# Functions that change their first argument.
CHANGING_FUNCTIONS = frozenset({"heappush", "heappop"})
# Local names of protobuf messages, which have fields of the same names.
MESSAGES = frozenset({"submit", "message", "report"})


class Changes(ast.NodeVisitor):
    """Collects the fields that a module changes: assigned, deleted, or called to change.

    Fields are told apart by name. A local name of a field (``output = request.output_token_ids``) counts as the field.
    An attribute of ``self`` counts in the records' own methods only.
    """

    def __init__(self) -> None:
        self.fields: set[str] = set()
        self._aliases: dict[str, str] = {}
        self._not_records = MESSAGES | {"self"}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer = self._not_records
        if node.name in CLASSES:
            self._not_records = MESSAGES
        self.generic_visit(node)
        self._not_records = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._aliases = (self._aliases, self._not_records), {}
        if node.name == "__init__":
            # A record's first values are no change of it.
            self._not_records = MESSAGES | {"self"}
        self.generic_visit(node)
        self._aliases, self._not_records = outer

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for left, right in _pair(target, node.value):
                self._note(left)
                if isinstance(left, ast.Name) and isinstance(right, ast.Attribute) and right.attr in FIELDS:
                    self._aliases[left.id] = right.attr
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._note(node.target)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            for item in target.elts if isinstance(target, ast.Tuple) else [target]:
                self._note(item)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            method, receiver = node.func.attr, node.func.value
            if method in CHANGING_FUNCTIONS:
                self._note_field(self._find_field(node.args[0]))
            elif method in CHANGING_CALLS or (method in TABLE_CALLS and self._find_field(receiver) == "table"):
                self._note_field(self._find_field(receiver))
        self.generic_visit(node)

    def _note(self, target: ast.expr) -> None:
        """Takes the target of an assignment; a local name that is assigned changes no field."""
        if not isinstance(target, ast.Name):
            self._note_field(self._find_field(target))

    def _note_field(self, field: str | None) -> None:
        if field in FIELDS:
            self.fields.add(field)

    def _find_field(self, node: ast.expr) -> str | None:
        """The field that an expression, or what it is an item of, stands for."""
        if isinstance(node, ast.Subscript):
            return self._find_field(node.value)
        if isinstance(node, ast.Name):
            # Functions that get a part of the state name it as the field is named.
            return self._aliases.get(node.id, "table" if node.id == "table" else None)
        if isinstance(node, ast.Attribute):
            is_other = isinstance(node.value, ast.Name) and node.value.id in self._not_records
            return None if is_other else node.attr
        return None


def _pair(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(target, ast.Tuple):
        values = value.elts if isinstance(value, ast.Tuple) else [None] * len(target.elts)
        yield from zip(target.elts, values, strict=True)
    else:
        yield target, value


def find_changes(source: str) -> set[str]:
    changes = Changes()
    changes.visit(ast.parse(textwrap.dedent(source)))
    return changes.fields


def find_owners() -> dict[str, set[str]]:
    """Modules by the field that they change."""
    owners: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for field in find_changes(path.read_text()):
            owners[field].add(path.relative_to(PACKAGE).with_suffix("").as_posix().removeprefix("scheduling/"))
    return owners


def test_every_field_is_changed_by_its_owners_alone():
    owners = {field: set(modules.split()) for field, (modules, _) in state.OWNERS.items()}
    assert find_owners() == owners


def test_many_owners_have_a_reason():
    assert not [field for field, (modules, reason) in state.OWNERS.items() if len(modules.split()) > 1 and not reason]


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        ("request.fence += 1", {"fence"}),
        ("stream.request, request.submission = None, None", {"request", "submission"}),
        ("del state.requests.live[request_id], state.requests.waiting[request_id]", {"live", "waiting"}),
        ("engine.slots[slot] = submission", {"slots"}),
        ("request.died_on.add(engine_id)", {"died_on"}),
        ("heapq.heappush(queues.deadlines, item)", {"deadlines"}),
        ("state.engines.table.remove(engine_id)", {"table"}),
        ("def f(request):\n    output = request.output_token_ids\n    output.append(1)", {"output_token_ids"}),
        ("def f(table):\n    table.report(engine_id, load, now)", {"table"}),
        ("class RouterOutbox:\n    def take(self):\n        self.actions = Actions()", {"actions"}),
        ("class RouterOutbox:\n    def __init__(self):\n        self.actions = Actions()", set()),
        ("class Page:\n    def __init__(self, status):\n        self.status = status", set()),
        ("fence = request.fence\nslots = list(engine.slots)\nload = engine.load.queued_requests", set()),
        ("submit.output_token_ids.extend(request.output_token_ids)", set()),
    ],
)
def test_changes_are_found(source, fields):
    assert find_changes(source) == fields
