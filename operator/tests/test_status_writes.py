"""When a status is written, with which Events, and what is told of it besides."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_kubernetes import FakeKubernetes
from test_conditions import find

from sluice_core.slo_attainment import SloCounts
from sluice_operator.api.names import ClusterKey
from sluice_operator.controller.status_step import StatusWriter
from sluice_operator.kubernetes.errors import BusyError
from sluice_operator.kubernetes.kinds import CLUSTERS
from sluice_operator.kubernetes.own_writes import OwnWrites, read_version

KEY = ClusterKey("default", "tiny")


@dataclass
class Writing:
    """A writer, the API server behind it, its clock, and what it tells."""

    now: float = 100.0
    kubernetes: FakeKubernetes = field(default_factory=FakeKubernetes)
    own_writes: OwnWrites = field(default_factory=OwnWrites)
    recorded: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    state: Any = field(default_factory=lambda: SimpleNamespace(measured_s=float("-inf")))

    def __post_init__(self) -> None:
        self.kubernetes.put(find().body)
        self.writer = StatusWriter(
            self.kubernetes,
            self.own_writes,
            "replica-1",
            now=lambda: self.now,
            now_text=lambda: f"t{self.now:.0f}Z",
            record_conditions=self.record,
        )

    def record(self, namespace: str, name: str, conditions: Any) -> None:
        self.recorded.append((namespace, name, {item["type"]: item["status"] for item in conditions}))

    async def update(self, num_finished: int = 0, **fields: Any) -> bool:
        """Updates the status of the object as it is; the counts are measurements, the fields anything else."""
        counts = {"": SloCounts(num_finished=num_finished, num_met_both=num_finished)} if num_finished else {}
        inputs = replace(find(), attainment=counts, **fields)
        return await self.writer.update(KEY, replace(inputs, body=self.body), self.state)

    @property
    def body(self) -> Any:
        return self.kubernetes.find(CLUSTERS, "tiny")

    @property
    def num_writes(self) -> int:
        return self.kubernetes.calls.count(("patch_status", "servingclusters"))


async def test_what_changed_is_written_once_told_and_known_as_our_own() -> None:
    writing = Writing()
    assert await writing.update() is False
    assert writing.num_writes == 1
    assert writing.own_writes.includes(read_version(writing.body))
    (told,) = writing.recorded
    assert told[:2] == ("default", "tiny")
    assert told[2] == {item["type"]: item["status"] for item in writing.body["status"]["conditions"]}
    reasons = [event["reason"] for event in writing.kubernetes.events]
    assert reasons[0] == "Serving"
    assert {(event["reportingInstance"], event["eventTime"]) for event in writing.kubernetes.events} == {
        ("replica-1", "t100.000000Z")
    }
    assert writing.state.measured_s == 100.0
    writing.now = 107.0
    assert await writing.update() is False
    assert (writing.num_writes, len(writing.kubernetes.events)) == (1, len(reasons))
    # The gauge of a process that has just begun to lead shows a status that nobody needs to write.
    assert writing.recorded == [told, told]
    # Measurements of five minutes stay the same for as long: the interval counts from the last look.
    assert writing.state.measured_s == 107.0


@pytest.mark.parametrize(("after_s", "is_written"), [(0.0, False), (14.9, False), (15.0, True)])
async def test_measurements_alone_are_written_after_their_interval(after_s: float, *, is_written: bool) -> None:
    writing = Writing()
    await writing.update(num_finished=3)
    writing.now += after_s
    assert await writing.update(num_finished=4) is not is_written
    assert writing.num_writes == 1 + is_written
    assert writing.body["status"]["attainment"]["requests"] == 3 + is_written
    assert writing.state.measured_s == 100.0 + (after_s if is_written else 0.0)
    # With something else they are written at once.
    writing.now += 1.0
    assert await writing.update(num_finished=5, refusals={"r1": "too much"}) is False
    assert writing.body["status"]["attainment"]["requests"] == 5
    assert writing.state.measured_s == writing.now


async def test_a_status_is_of_this_very_object() -> None:
    writing = Writing()
    seen: list[Any] = []
    patch_status = writing.kubernetes.patch_status

    async def note(kind: Any, namespace: str, name: str, patch: Any) -> Any:
        seen.append((kind, namespace, name, patch["metadata"]))
        return await patch_status(kind, namespace, name, patch)

    writing.kubernetes.patch_status = note
    await writing.update()
    assert seen == [(CLUSTERS, "default", "tiny", {"uid": writing.body["metadata"]["uid"]})]


async def test_an_event_that_cannot_be_created_keeps_neither_status_nor_the_others_from_being_written() -> None:
    writing, calls = Writing(), []

    def fail(verb: str, plural: str) -> None:
        calls.append((verb, plural))
        if verb == "create" and calls.count(("create", "events")) == 1:
            raise BusyError("503")

    writing.kubernetes.before = fail
    assert await writing.update() is False
    assert calls.count(("create", "events")) == len(writing.kubernetes.events) + 1 > 1
    assert writing.body["status"]["conditions"]


async def test_a_denied_read_is_said_and_the_rest_of_the_status_stays() -> None:
    writing = Writing()
    await writing.update()
    before = writing.body["status"]
    writing.now = 130.0
    await writing.writer.write_forbidden(KEY, writing.body, "pods is forbidden " * 300)
    after = writing.body["status"]
    changed = [item for item in after["conditions"] if item not in before["conditions"]]
    assert [(item["type"], item["status"], item["reason"]) for item in changed] == [("Degraded", "True", "Forbidden")]
    assert changed[0]["lastTransitionTime"] == "t130Z"
    assert changed[0]["observedGeneration"] == writing.body["metadata"]["generation"]
    assert len(changed[0]["message"]) == 4096
    assert len(after["conditions"]) == len(before["conditions"])
    assert {**after, "conditions": []} == {**before, "conditions": []}
    assert writing.recorded[-1][2]["Degraded"] == "True"
    assert writing.kubernetes.events[-1]["reason"] == "Forbidden"
    num_writes = writing.num_writes
    await writing.writer.write_forbidden(KEY, writing.body, "pods is forbidden " * 300)
    assert writing.num_writes == num_writes
