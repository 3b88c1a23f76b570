"""Outputs with a constraint are the same wherever they are made: moved by force, or with their engine killed."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from cluster import Result, stream_through_fault
from workload import Request, make_prompt

from sluice.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster import Cluster

pytestmark = pytest.mark.engine

STOP = sampling_pb2.FINISH_REASON_STOP
FINISHED = {STOP, sampling_pb2.FINISH_REASON_LENGTH}
# Random weights write white space and properties of any name without end wherever a schema allows them.
PARTS = {"a": {"type": "number"}, "b": {"type": "string", "minLength": 60, "maxLength": 200}, "c": {"type": "boolean"}}
REQUIRED = {"type": "object", "properties": PARTS, "required": ["a", "b"], "additionalProperties": False}
OPTIONAL = {"type": "object", "properties": PARTS, "additionalProperties": False}
SHAPELESS = {"type": "object", "properties": PARTS}
MULTIPLES = {"type": "number", "multipleOf": 3}
REGEX = r"(ab|cd|ef){3}[0-9]{40,90}(xy){20,90}!"
GRAMMAR = 'start: item ("," item)* "."\nitem: /[0-9]{90,150}/ | "(" start ")"'
CHOICES = ["left of the house", "right of the house", "behind it"]


def fits_schema(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


Constraint = sampling_pb2.StructuredOutput
CONSTRAINTS: dict[str, tuple[Constraint, Callable[[str], bool]]] = {
    **{
        name: (Constraint(json_schema=json.dumps(schema)), fits_schema(schema))
        for name, schema in (
            ("required", REQUIRED),
            ("optional", OPTIONAL),
            ("shapeless", SHAPELESS),
            ("multiples", MULTIPLES),
        )
    },
    "regex": (Constraint(regex=REGEX), lambda text: bool(re.fullmatch(REGEX, text))),
    "grammar": (Constraint(grammar=GRAMMAR), lambda text: bool(re.fullmatch(r"[0-9(),.]+\.", text))),
    "choice": (Constraint(choices=Constraint.Choices(values=CHOICES)), CHOICES.__contains__),
    "any-object": (Constraint(json_object=True), lambda text: isinstance(json.loads(text), dict)),
}
# Those whose answers are long enough to be moved.
LONG = ("required", "shapeless", "regex", "grammar")
NUM_SEEDS = 3
# A request decodes on for dozens of tokens while a move copies.
MAX_TOKENS = 200
MOST_ROUNDS = 6


def make_requests(label: str) -> list[tuple[str, Request]]:
    rng = random.Random(16)
    return [
        (
            name,
            Request(
                name=f"{label}-{name}-{seed}",
                prompt_token_ids=make_prompt(40 + 50 * seed, rng),
                sampling={"temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS, "structured_output": constraint},
            ),
        )
        for name, (constraint, _) in CONSTRAINTS.items()
        for seed in range(NUM_SEEDS)
    ]


def check(constraint: str, result: Result) -> None:
    assert result.finish_reason in FINISHED, (result.name, result.finish_reason)
    if result.finish_reason == STOP:
        assert CONSTRAINTS[constraint][1](result.text), (result.name, result.text)


async def run_all(cluster: Cluster, label: str, engines: Sequence[str] = ()) -> list[Result]:
    """Runs all requests, with ``engines`` each with two moves at drawn tokens."""
    rng = random.Random(label)
    requests = make_requests(label)
    async with cluster.client() as client, asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(
                client.generate(
                    request,
                    move_at=tuple(sorted(rng.sample(range(1, 30), 2))) if engines else (),
                    route=tuple(rng.sample(engines, 2)) if engines else (),
                )
            )
            for _, request in requests
        ]
    results = [task.result() for task in started]
    for (constraint, _), result in zip(requests, results, strict=True):
        check(constraint, result)
    return results


async def test_outputs_with_a_constraint_are_the_same_where_they_are_moved_to(cluster: Cluster) -> None:
    where_they_began = await run_all(cluster, "still")
    num_moved: Counter[str] = Counter()
    # Short answers end before a move is done, so chance decides how many move.
    for number in range(MOST_ROUNDS):
        moved = await run_all(cluster, f"moved-{number}", sorted(cluster.processes("engine")))
        for (name, _), result, still in zip(make_requests(""), moved, where_they_began, strict=True):
            assert result.token_ids == still.token_ids, result.name
            num_moved[name] += result.num_hand_offs > 0
        if all(num_moved[name] for name in LONG):
            break
    print(f"moved: {dict(num_moved)}")
    assert all(num_moved[name] for name in LONG), num_moved


async def test_outputs_with_a_constraint_are_the_same_when_their_engine_is_killed(cluster: Cluster) -> None:
    undisturbed = await run_all(cluster, "undisturbed")
    requests = make_requests("killed")
    due = sum(len(result.token_ids) for result in undisturbed) // 4
    before = cluster.pid("engine-0")
    results = await stream_through_fault(
        cluster, [request for _, request in requests], due, lambda: cluster.kill("engine-0", signal.SIGKILL)
    )
    for (constraint, _), result, expected in zip(requests, results, undisturbed, strict=True):
        check(constraint, result)
        assert result.token_ids == expected.token_ids, result.name
    await asyncio.to_thread(cluster.wait_replaced, "engine-0", before)
