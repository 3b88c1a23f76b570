"""Drawn traffic: all that the router tells engines, clients and people is as it was when the record was written.

Scenarios draw what happens by a seed: requests of all kinds, deaths, broken streams, moves, plans, pauses. Beside it
hold the rules of the harness: no token twice, late or foreign, and nothing leaks. ``drawn_traffic.json`` has a short
hash of what came of each step. After a change of behaviour that is wanted, write the record anew, and say in the commit
what changed:

    PYTHONPATH=router/tests:protos/tests .venv/bin/python router/tests/test_drawn_traffic.py

With a scenario's name as argument this prints its steps in place of that, to compare two versions of the code.
"""

from __future__ import annotations

import json
import random
import re
import sys
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from data_plane_harness import CheckingResponseStream, Harness
from fake_engine import PARAMETERS, expected_output, make_plan
from google.protobuf import text_format
from recorded_steps import check_steps, shorten_all

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice_core.records import EngineId, RequestId
from sluice_core.strategies import STRATEGIES
from sluice_router.errors import NoEngineError, PlanRefusedError, RouterError
from sluice_router.scheduling.requests import NewRequest
from sluice_router.settings import make_limits

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = Path(__file__).with_name("drawn_traffic.json")
NUM_RUNS = 4
NUM_STEPS = 70
NAMES = ("p0", "p1", "d0", "d1")
CAUSES = (
    engine_pb2.MOVE_CAUSE_PREFILL_DONE,
    engine_pb2.MOVE_CAUSE_DEGRADE,
    engine_pb2.MOVE_CAUSE_BACKFLOW,
    engine_pb2.MOVE_CAUSE_DRAIN,
)
LIMITS = make_limits(
    wait_limit_s=4.0,
    stream_wait_limit_s=4.0,
    max_waiting=12,
    max_moves_per_engine=4,
    grant_timeout_s=0.5,
    copy_timeout_s=0.8,
    pull_timeout_s=1.0,
    num_samples=40,
    max_recoveries=2,
)
CLASSES = (
    plan_pb2.SloClass(name="", ttft_milliseconds=300, tpot_milliseconds=15),
    plan_pb2.SloClass(name="batch", ttft_milliseconds=9000, tpot_milliseconds=400, priority=-3),
    plan_pb2.SloClass(name="gold", ttft_milliseconds=60, tpot_milliseconds=11, priority=5),
)
OWNER_LIMITS = (
    plan_pb2.OwnerLimits(owner="alice", requests_per_minute=12, tokens_per_minute=900, classes=["", "batch"], weight=3),
    plan_pb2.OwnerLimits(owner="*", concurrent_requests=3, max_output_tokens=50, weight=1),
)
# What real time and real chance decide.
UNREPEATABLE = ("sluice_decision_seconds", "sluice_loop_lag_seconds", "_created")
# A number, behind its name where a message is shown.
FLOAT = re.compile(r"( \w+: )?(-?\d+\.\d+(?:e-?\d+)?)")
# What is left where equal numbers are subtracted. It is another number from Python 3.12 on, whose ``sum`` loses less.
ROUNDING_ERROR = 1e-12


def write_float(found: re.Match[str]) -> str:
    """Writes a number without what rounding has left; a message shows no field that is 0."""
    name, value = found[1] or "", float(found[2])
    if 0 < abs(value) < ROUNDING_ERROR:
        return "" if name else "0"
    return f"{name}{value:.6g}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a run is made of.

    Args:
        strategy: The strategy of its plans; "any": another one in each.
        changes: Of the fields of plans.
        engines: Of the fields of each engine, by its name.
        weights: How often what is drawn, where that differs from ``WEIGHTS``.
        parameters: Of the strategy.
        model_id: The model that the router serves.
        tpot_slos_s: What requests ask for.
    """

    strategy: str = "taichi"
    changes: dict[str, Any] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, str] | None = None
    model_id: str = ""
    tpot_slos_s: tuple[float | None, ...] = (None, None, 0.0101, 0.3)


WEIGHTS = {
    "admit": 16,
    "step": 26,
    "step_one": 6,
    "deliver": 6,
    "propose": 8,
    "move": 5,
    "cancel": 2,
    "break_client": 1,
    "stop": 2,
    "return_unstarted": 3,
    "kill": 1,
    "attach": 4,
    "cut": 2,
    "reconnect": 4,
    "refuse": 5,
    "change_plan": 2,
    "wait": 4,
    "load": 3,
    "drain": 1,
    "misbehave": 1,
    "look": 3,
}
CALM = {"kill": 0, "cut": 0, "cancel": 1, "misbehave": 0, "wait": 1, "break_client": 0, "refuse": 1}
ROUGH = {"kill": 4, "cut": 6, "attach": 9, "reconnect": 9, "wait": 8}
NO_PAUSE = {**PARAMETERS, "min_tokens_between_moves": "0"}
PARTS = {name: {"pulls_parts": True} for name in NAMES}
CUTS = {name: {"pulls_parts": True, "cuts_prompts": True, "first_part_steps": 3} for name in NAMES}
KEPT = {name: {"hands_off_prefills": name.startswith("p")} for name in NAMES}
SMALL = {name: {"kv_blocks_total": 12, "max_num_seqs": 3} for name in NAMES}
TWO_MODELS = {"p1": {"fingerprint": "fp2"}, "d1": {"fingerprint": "fp2", "max_model_len_tokens": 90}}
REPLACED = {"p0": {"model_id": "old"}, "d0": {"model_id": "old"}, "p1": {"model_id": "new"}, "d1": {"model_id": "new"}}
MODELS = (
    plan_pb2.ServedModel(model_id="new", served_name="new-name"),
    plan_pb2.ServedModel(model_id="old", served_name="old-name"),
)

SCENARIOS = {
    "taichi": Scenario(parameters=NO_PAUSE),
    "taichi, calm": Scenario(weights=CALM),
    "taichi, rough": Scenario(weights=ROUGH, parameters=NO_PAUSE),
    "taichi, parts": Scenario(engines=PARTS, parameters=NO_PAUSE),
    "taichi, parts, rough": Scenario(engines=PARTS, weights=ROUGH, parameters=NO_PAUSE),
    "taichi, classes": Scenario(changes={"slo_classes": CLASSES}, weights=CALM),
    "taichi, rejects": Scenario(
        changes={"slo_classes": CLASSES[:2]},
        parameters={**PARAMETERS, "early_rejection": "Reject"},
        engines=SMALL,
        weights=CALM,
    ),
    "taichi, late at random": Scenario(parameters={**PARAMETERS, "early_rejection": "Random"}, weights=CALM),
    "taichi, owners": Scenario(changes={"slo_classes": CLASSES, "owner_limits": OWNER_LIMITS}, weights=CALM),
    "taichi, three routers": Scenario(changes={"num_routers": 3}, parameters=NO_PAUSE),
    "taichi, two fingerprints": Scenario(
        engines=TWO_MODELS, parameters=NO_PAUSE, weights={"change_plan": 6, "drain": 4}
    ),
    "taichi, replaced model": Scenario(
        engines=REPLACED, changes={"served_models": MODELS}, parameters=NO_PAUSE, model_id="old", weights={"kill": 3}
    ),
    "taichi, little room": Scenario(engines=SMALL, parameters=NO_PAUSE),
    "owners, rough": Scenario(changes={"owner_limits": OWNER_LIMITS[1:]}, weights=ROUGH),
    "switches": Scenario("any", weights={"change_plan": 9}, tpot_slos_s=(None, 0.2)),
    "switches, parts, rough": Scenario("any", engines=PARTS, weights={**ROUGH, "change_plan": 9}),
    "disaggregated, parts": Scenario("disaggregated", engines={name: {**KEPT[name], **PARTS[name]} for name in NAMES}),
    "aggregated": Scenario("aggregated"),
    "disaggregated": Scenario("disaggregated", engines=KEPT),
    "disaggregated, rough": Scenario("disaggregated", engines=KEPT, weights=ROUGH),
    "disaggregated, little room": Scenario(
        "disaggregated", engines={name: {**KEPT[name], **SMALL[name]} for name in NAMES}, weights={"refuse": 9}
    ),
    "dynaserve": Scenario("dynaserve"),
    "dynaserve, prompts": Scenario("dynaserve", engines=CUTS, weights=CALM),
    "dynaserve, prompts, rough": Scenario("dynaserve", engines=CUTS, weights=ROUGH),
    "flowprefill": Scenario("flowprefill", changes={"slo_classes": CLASSES}),
    "ecoserve": Scenario("ecoserve"),
    "sluice": Scenario("sluice", engines=PARTS, tpot_slos_s=(None, None, 0.2, 0.3)),
    "sluice, rough": Scenario("sluice", engines=PARTS, weights=ROUGH, tpot_slos_s=(None, None, 0.2, 0.3)),
}


class TellingStream(CheckingResponseStream):
    """A client that also writes down what it is told."""

    def __init__(self, prompt: list[int], name: str, told: list[str]) -> None:
        super().__init__(prompt)
        self.name, self.told = name, told

    def on_token(self, token_id, logprobs) -> int | None:
        stop_at = super().on_token(token_id, logprobs)
        # A stop text may have begun with the token before.
        return None if stop_at is None else max(1, stop_at - len(self.token_ids) % 2)

    def flush(self, now: float) -> None:
        super().flush(now)
        self.told.append(f"{self.name} has {len(self.token_ids)} tokens, logprobs {len(self.logprobs)}")

    def on_finished(self, finish) -> None:
        super().on_finished(finish)
        self.told.append(f"{self.name} ends: {finish}")

    def on_error(self, error: RouterError) -> None:
        super().on_error(error)
        self.told.append(f"{self.name} fails: {describe_error(error)}")


class TellingHarness(Harness):
    """A data plane that writes down what goes to engines."""

    told: list[str]

    def send(self, engine, message) -> None:
        self.told.append(f"to {engine.engine_id}: {text_format.MessageToString(message, as_one_line=True)}")
        super().send(engine, message)

    def close(self, engine, reason: str) -> None:
        self.told.append(f"close {engine.engine_id}: {reason}")
        if self.engines.get(engine.engine_id) is engine:
            self.cores[engine.engine_id].hold()
        super().close(engine, reason)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__} {getattr(error, 'code', '')} {getattr(error, 'retry_after_s', None)} {error}"


def describe_event(event: tuple[Any, ...]) -> str:
    """Describes a decision; of a placement not the engines that were looked at, which the core's own tests know."""
    _, request_id, kind, *values = event
    if kind == "placement" and values[0] is not None:
        request = values[0].request
        values = [replace(request, excluded=frozenset()), sorted(request.excluded), values[0].decision]
    return f"{request_id} {kind} {values}"


class Run:
    """One drawn run.

    Args:
        name: The scenario's.
        number: Tells its runs apart.
    """

    scenarios = SCENARIOS

    def __init__(self, name: str, number: int) -> None:
        self.scenario = self.scenarios[name]
        self.rng = random.Random(f"{name} {number}")
        self.told: list[str] = []
        self.steps: list[list[str]] = []
        self.harness = TellingHarness(limits=LIMITS, model_id=self.scenario.model_id)
        self.harness.told = self.told
        self.num_events = 0
        self.num_requests = 0
        self.generation = 1
        self.epoch = 1
        self.harness.router.on_change(lambda: self.told.append("the status changed"))
        for engine in NAMES:
            self.attach_engine(engine)
        self.apply_plan()
        self.harness.deliver()
        self.end_step("begin")

    def go(self) -> list[list[str]]:
        """Runs it; returns what came of each step."""
        weights = {**WEIGHTS, **self.scenario.weights}
        for _ in range(NUM_STEPS):
            (action,) = self.rng.choices(list(weights), list(weights.values()))
            getattr(self, action)()
            self.end_step(action)
        self.settle()
        self.end_step("settle")
        return self.steps

    def end_step(self, action: str) -> None:
        """Takes what this step brought, the decisions on requests included."""
        events = list(self.harness.state.decision_log._events)
        new = [describe_event(event) for event in events[self.num_events :]]
        self.num_events = len(events)
        lines = [f"{action} at {self.harness.clock.now_s}", *self.told, *new]
        self.steps.append([FLOAT.sub(write_float, line) for line in lines])
        self.told.clear()

    def attempt(self, act: Callable[[], object]) -> None:
        """Does what may be refused."""
        try:
            self.told.append(f"answer: {act()}")
        except (RouterError, PlanRefusedError) as error:
            self.told.append(f"refused: {describe_error(error)}")

    # What may happen

    def admit(self) -> None:
        rng, classes = self.rng, self.scenario.changes.get("slo_classes")
        for _ in range(rng.choice((1, 1, 2, 5))):
            self.num_requests += 1
            length = rng.choice((1, 15, 16, 17, 33, 60))
            sampling = sampling_pb2.SamplingParams(
                max_tokens=rng.choice((*range(24), 30, 45, 60)), temperature=rng.choice((0.0, 0.0, 1.0))
            )
            if rng.random() < 0.2:
                sampling.num_logprobs = 2
            if rng.random() < 0.2:
                sampling.seed = 7
            now = self.harness.clock.now_s
            name = f"r{self.num_requests}"
            request = NewRequest(
                request_id=RequestId(name),
                prompt_token_ids=array("I", range(1, 1 + length)),
                sampling=sampling,
                slo_class=rng.choice([item.name for item in classes] if classes else ["", "", "", "", "", "none"]),
                ttft_slo_s=rng.choice((None, None, 0.02, 3.0)),
                tpot_slo_s=rng.choice(self.scenario.tpot_slos_s),
                priority=rng.choice((None, None, 2, 7)),
                arrival_s=now - rng.choice((0.0, 0.004)),
                deadline_s=now + 0.5 if rng.random() < 0.1 else None,
                client_request_id=rng.choice(("", f"mine-{self.num_requests}")),
                owner=rng.choice(("alice", "bob", "")) if "owner_limits" in self.scenario.changes else "",
                **self.draw_more(name),
            )
            stream = TellingStream(list(request.prompt_token_ids), name, self.told)
            stream.stop_at = rng.choice((None, None, None, 1, 9))
            self.harness.response_streams[request.request_id] = stream
            self.attempt(lambda request=request, stream=stream: self.harness.router.admit(request, stream))

    def draw_more(self, _: str) -> dict[str, Any]:
        """Draws more of what a request asks for."""
        return {}

    def step(self) -> None:
        for _ in range(self.rng.choice((1, 1, 3))):
            self.harness.step_all()

    def step_one(self) -> None:
        name = self.rng.choice(NAMES)
        self.harness.clock.advance(0.007)
        if name in self.harness.cores:
            self.harness.step(name)

    def deliver(self) -> None:
        name = self.rng.choice((*NAMES, ""))
        if name:
            self.harness.deliver_down(name)
            self.harness.deliver_up(name)
        else:
            self.harness.deliver()

    def propose(self) -> None:
        for name in self.rng.sample(NAMES, 2):
            if name in self.harness.engines:
                self.harness.up[name].append(self.harness.cores[name].propose(self.rng.choice(CAUSES)))
        if self.rng.random() < 0.7:
            self.harness.deliver()

    def pick(self) -> RequestId | None:
        live = list(self.harness.state.requests.live)
        return self.rng.choice(live) if live else None

    def move(self) -> None:
        request_id, engine = self.pick() or "nobody", EngineId(self.rng.choice((*NAMES, "x9")))
        self.attempt(lambda: self.harness.router.move(request_id, engine))

    def cancel(self) -> None:
        if (request_id := self.pick()) is not None:
            self.harness.response_streams[request_id].is_cancelled = True
            self.harness.router.cancel(request_id)

    def break_client(self) -> None:
        if (request_id := self.pick()) is not None:
            stream, fault = self.harness.response_streams[request_id], RuntimeError("a broken client")
            if self.rng.random() < 0.5:
                stream.raises = fault
            else:
                stream.raises_on_flush = fault

    def stop(self) -> None:
        """A client's stop text will be complete with its next token."""
        if (request_id := self.pick()) is not None:
            stream = self.harness.response_streams[request_id]
            stream.stop_at = len(stream.token_ids) + 1

    def return_unstarted(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.harness.engines:
            self.harness.up[name].append(self.harness.cores[name].return_unstarted())

    def kill(self) -> None:
        self.harness.kill(self.rng.choice(NAMES))

    def attach(self) -> None:
        name = self.rng.choice(NAMES)
        if name not in self.harness.engines or self.rng.random() < 0.1:
            self.attach_engine(name)

    def attach_engine(self, name: str) -> None:
        self.epoch += 1
        self.harness.attach(name, epoch=self.epoch, **self.scenario.engines.get(name, {}))

    def cut(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.harness.engines:
            self.harness.cut(name)

    def reconnect(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.harness.cores:
            self.harness.reconnect(name)

    def refuse(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.harness.cores:
            core = self.harness.cores[name]
            core.refuse_grants = self.rng.choice(("", "", "kv"))
            core.refuse_hand_offs = self.rng.choice(("", "", "preempted"))
            core.refuse_offers = self.rng.choice(("", "", "gone"))
            core.refuse_parts = self.rng.choice(("", "", "transfer"))

    def change_plan(self) -> None:
        self.generation += self.rng.choice((0, 1, 1, 1, 1))
        self.attempt(self.apply_plan)

    def apply_plan(self) -> None:
        roles = self.draw_roles()
        if self.generation == 1:
            roles = {name: name[0].upper() for name in NAMES}
        parameters = self.scenario.parameters
        if parameters is None:
            parameters = PARAMETERS if self.scenario.strategy == "taichi" else {}
        if self.scenario.strategy == "any":
            row, parameters = self.rng.choice(list(STRATEGIES.values())), {}
        else:
            row = STRATEGIES[self.scenario.strategy]
        fields = {"strategy": row.name, "strategy_parameters": parameters, **self.scenario.changes}
        self.harness.router.apply_plan(make_plan(roles, generation=self.generation, **fields))

    def draw_roles(self) -> dict[str, str]:
        return {name: name[0].upper() + self.rng.choice(("", "", "", "-drain")) for name in NAMES}

    def wait(self) -> None:
        self.harness.clock.advance(self.rng.choice((0.05, 0.31, 0.6, 1.1, 2.2)))
        self.harness.router.tick()

    def load(self) -> None:
        """An engine reports its load, now and then that of an old iteration."""
        name = self.rng.choice(NAMES)
        if name in self.harness.engines:
            load = self.harness.cores[name].load()
            load.iteration_age_s = self.rng.choice((0.0, 0.3, 3.0))
            load.transport = self.rng.choice(("fake", "tcp"))
            self.harness.up[name].append(engine_pb2.AttachResponse(load=load, fault=self.rng.choice(("", "", "hot"))))

    def drain(self) -> None:
        name = self.rng.choice(NAMES)
        if name in self.harness.cores:
            self.harness.cores[name].is_draining = True

    def misbehave(self) -> None:
        """An engine breaks the protocol, or ends a request as only it can."""
        name = self.rng.choice(NAMES)
        if name not in self.harness.engines:
            return
        message, running = engine_pb2.AttachResponse(), self.harness.cores[name].running
        kind = self.rng.choice(("slot", "index", "columns", "refused", "error"))
        if kind == "slot":
            message.finished.add(slot=63, reason=sampling_pb2.FINISH_REASON_STOP)
        elif kind == "columns":
            message.slots.append(0)
        elif running:
            slot = self.rng.choice(list(running))
            if kind == "index":
                message.slots.append(slot)
                message.token_ids.append(1)
                message.output_indexes.append(running[slot].num_output + 5)
            else:
                del running[slot]
                reason = f"FINISH_REASON_{kind.upper()}"
                message.finished.add(slot=slot, reason=getattr(sampling_pb2, reason), error="why not")
        self.harness.up[name].append(message)

    def look(self) -> None:
        """People look at the router."""
        router = self.harness.router
        self.told.append(text_format.MessageToString(router.describe(), as_one_line=True))
        self.told += [f"ready: {router.is_ready} {router.not_ready_reason} {router.model.name}"]
        lines = router.format_metrics().decode().splitlines()
        self.told += [
            line for line in lines if not line.startswith("#") and not any(word in line for word in UNREPEATABLE)
        ]

    def settle(self) -> None:
        """Everybody comes back; what is left ends, and nothing leaks."""
        for name in NAMES:
            if name not in self.harness.engines:
                self.attach_engine(name)
            core = self.harness.cores[name]
            core.is_draining, core.refuse_grants, core.refuse_hand_offs = False, "", ""
            core.refuse_offers = core.refuse_parts = ""
        self.generation += 1
        self.attempt(self.apply_plan)
        self.harness.run(200)
        self.harness.router.fail_all(lambda: NoEngineError("the end", retry_after_s=1.0))
        self.harness.run(10)
        self.look()
        for stream in self.harness.response_streams.values():
            assert stream.token_ids == expected_output(stream.prompt, len(stream.token_ids))


@pytest.mark.parametrize("name", SCENARIOS)
def test_drawn_traffic_is_as_recorded(name: str) -> None:
    recorded = json.loads(RECORD.read_text())[name]
    assert len(recorded) == NUM_RUNS
    for run, all_digits in enumerate(recorded):
        check_steps(Run(name, run).go(), all_digits, f"run {run}, ")


def main() -> None:
    """Writes the record, or prints scenarios."""
    for name in sys.argv[1:]:
        for run in range(NUM_RUNS):
            for number, lines in enumerate(Run(name, run).go()):
                print(f"run {run}, step {number}", *lines, sep="\n  ")
    if not sys.argv[1:]:
        record = {name: [shorten_all(Run(name, run).go()) for run in range(NUM_RUNS)] for name in SCENARIOS}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
