"""Drawn traffic whose clients come back: answers are claimed and gone on with, while routers and engines fail.

As ``test_drawn_traffic``, which says how the record is read; this one is written anew by

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest -q router/tests/test_drawn_resumption.py
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from recorded_steps import check_record
from test_drawn_traffic import (
    CALM,
    CLASSES,
    KEPT,
    LIMITS,
    NAMES,
    NO_PAUSE,
    OWNER_LIMITS,
    PARTS,
    ROUGH,
    Run,
    Scenario,
    TellingHarness,
    TellingStream,
    describe_error,
)

from sluice.v1 import engine_pb2
from sluice_core.records import RequestId
from sluice_router.errors import RouterError
from sluice_router.scheduling.requests import FoundRequest, NewRequest, rewind

RECORD = Path(__file__).with_name("drawn_resumption.json")
NUM_RUNS = 4
# Beside those of all drawn traffic.
CLIENTS = {"claim": 14, "take_up": 16, "detach": 4, "change_router": 5, "wait": 1}
CACHED = {name: {"num_cached_tokens": 16 if name in {"p1", "d0"} else 0} for name in NAMES}

SCENARIOS = {
    "resumed": Scenario(weights={**CALM, **CLIENTS}, engines=CACHED, parameters=NO_PAUSE),
    "resumed, rough": Scenario(weights={**ROUGH, **CLIENTS}, parameters=NO_PAUSE),
    "resumed, classes and owners": Scenario(
        changes={"slo_classes": CLASSES, "owner_limits": OWNER_LIMITS[1:]}, weights={**CALM, **CLIENTS}
    ),
    "resumed, disaggregated": Scenario("disaggregated", engines=KEPT, weights={**CALM, **CLIENTS}),
    "resumed, sluice, parts": Scenario("sluice", engines=PARTS, weights=CLIENTS, tpot_slos_s=(None, 0.2)),
    "resumed, dynaserve": Scenario("dynaserve", weights=CLIENTS),
    "standing still": Scenario(weights={**CALM, "stand_still": 6, "move": 9}, parameters=NO_PAUSE),
    "standing still, parts": Scenario(weights={**CALM, "stand_still": 6}, engines=PARTS, parameters=NO_PAUSE),
    "standing still, disaggregated": Scenario("disaggregated", weights={**CALM, "stand_still": 6}, engines=KEPT),
    "held": Scenario(changes={"hold_seconds": 9}, weights={**CALM, "change_plan": 9, "wait": 9, "kill": 1}),
}


def describe_found(result: FoundRequest | RouterError) -> str:
    """Describes what a claim brought."""
    if isinstance(result, RouterError):
        return describe_error(result)
    submit = text_format.MessageToString(result.submit, as_one_line=True)
    engine = getattr(result.engine, "engine_id", None)
    values = [result.output_token_ids.tolist(), result.elapsed_s, result.num_tokens_before, engine, result.ended]
    logprobs = {index: entry.logprob for index, entry in sorted(result.logprobs.items())}
    return f"{submit} {values} {result.live is not None} {logprobs} {result.is_certain}"


class ResumingRun(Run):
    """One drawn run.

    ``asked`` has what clients asked for, ``orphans`` those whose router has died, ``found`` what was found for them.
    """

    scenarios = SCENARIOS

    def __init__(self, name: str, number: int) -> None:
        self.asked: dict[str, NewRequest] = {}
        self.found: list[tuple[str, FoundRequest]] = []
        self.orphans: list[str] = []
        super().__init__(name, number)

    def draw_more(self, name: str) -> dict[str, Any]:
        if "claim" not in self.scenario.weights or self.rng.random() < 0.1:
            return {}
        return {"resume_key": name.encode(), "resume_state": b"state of " + name.encode()}

    def draw_roles(self) -> dict[str, str]:
        roles = super().draw_roles()
        if "hold_seconds" in self.scenario.changes and self.rng.random() < 0.5:
            roles = {name: f"{name[0].upper()}-drain" for name in NAMES}
        return roles

    def watch(self) -> None:
        """Remembers what was admitted, for those who come back."""
        for request_id, request in self.harness.state.requests.live.items():
            self.asked.setdefault(request_id, request.new)

    def end_step(self, action: str) -> None:
        self.watch()
        super().end_step(action)

    def claim(self) -> None:
        self.ask_for(self.rng.choice([*self.orphans, *list(self.asked)[-3:], "nobody"]))
        if self.rng.random() < 0.8:
            self.harness.deliver()

    def ask_for(self, name: str) -> None:
        def take(result: FoundRequest | RouterError) -> None:
            self.told.append(f"{name} is found: {describe_found(result)}")
            if isinstance(result, FoundRequest):
                self.found.append((name, result))

        self.attempt(lambda: self.harness.router.claim(name.encode(), take))

    def take_up(self) -> None:
        """A client goes on where it was, or the router lets it go on at an earlier token."""
        if not self.found:
            self.claim()
            return
        name, found = self.found.pop(self.rng.randrange(len(self.found)))
        now, submit, known = self.harness.clock.now_s, found.submit, len(found.output_token_ids)
        new = replace(
            self.asked[name],
            sampling=submit.sampling,
            prompt_token_ids=array("I", submit.prompt_token_ids),
            arrival_s=now - submit.age_s - found.elapsed_s,
            deadline_s=self.rng.choice((None, None, now + 0.5)),
        )
        if known > 1 and self.rng.random() < 0.3:
            found = rewind(found, self.rng.randrange(1, known))
        stop_at = self.rng.choice((None, None, None, len(found.output_token_ids) or None))
        stream = TellingStream(list(new.prompt_token_ids), name, self.told)
        stream.token_ids = list(found.output_token_ids)

        def adopt() -> None:
            self.harness.router.adopt(found, new, stream, stop_at)
            self.harness.response_streams[RequestId(name)] = stream
            if name in self.orphans:
                self.orphans.remove(name)

        self.attempt(adopt)

    def detach(self) -> None:
        """A client is gone that may come back."""
        request_id = self.pick()
        if request_id is not None and self.harness.state.requests.live[request_id].new.resume_key:
            self.harness.router.detach(request_id)

    def change_router(self) -> None:
        """The router dies, and its engines go on; another one with a clock of its own takes over."""
        old, self.found = self.harness, []
        live = old.state.requests.live.values()
        self.orphans = [str(request.request_id) for request in live if request.new.resume_key]
        self.harness = TellingHarness(limits=LIMITS, model_id=self.scenario.model_id)
        self.harness.told, self.num_events = self.told, 0
        self.harness.clock.now_s = old.clock.now_s + 777.0
        self.harness.router.on_change(lambda: self.told.append("the status changed"))
        for name, core in old.cores.items():
            core.hold()
            core.offers.clear()
            core.parts_under_way.clear()
            self.harness.cores[name] = core
            # It tells a router of that router's own requests alone.
            kept, core.kept = core.kept, {}
            self.harness._attach(core)
            core.kept = kept
        self.attempt(self.apply_plan)
        self.harness.deliver()
        # Most clients are back at once.
        for name in self.orphans:
            if self.rng.random() < 0.7:
                self.ask_for(name)
        self.harness.deliver()
        while self.found and self.rng.random() < 0.8:
            self.take_up()

    def stand_still(self) -> None:
        """Engines report for two seconds and more, but for one; another computes nothing."""
        silent, hung = self.rng.sample(NAMES, 2)
        for _ in range(self.rng.choice((15, 20, 21, 24))):
            self.harness.clock.advance(0.1)
            for name in list(self.harness.engines):
                if name != silent and name in self.harness.engines:
                    load = self.harness.cores[name].load()
                    load.iteration_age_s = 1e9 if name == hung else 0.01
                    self.harness.router.handle_message(self.harness.engines[name], engine_pb2.AttachResponse(load=load))
            self.harness.router.tick()

    def look(self) -> None:
        super().look()
        router = self.harness.router
        self.told.append(f"holding: {router.is_holding}; limits {[router.find_output_limit(o) for o in ('', 'bob')]}")

    def settle(self) -> None:
        super().settle()
        queues = self.harness.state.requests
        left = (queues.live, queues.waiting, queues.awaiting_resume, queues.kept, queues.detached, queues.by_resume_key)
        assert not any(left)


@pytest.mark.parametrize("name", SCENARIOS)
def test_drawn_resumption_is_as_recorded(name: str) -> None:
    for number in range(NUM_RUNS):
        check_record(RECORD, f"{name} {number}", ResumingRun(name, number).go())
