"""Drawn streams of three routers to an engine's server: each message and each command is as it was when recorded.

``drawn_streams.json`` has a short hash of what came of each step. After a change of behaviour that is wanted, write the
record anew, and say in the commit what changed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest -n0 engine_image/tests/test_drawn_streams.py

``SLUICE_TELL=NUMBER`` prints a run's steps, to compare two versions of the code.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_server_harness import ERROR, LENGTH, STOP, Engine, Router, output, settle, submit
from fake_core import FINGERPRINT, Builder, Clock, Core
from google.protobuf import text_format
from recorded_steps import check_record

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import plan_pb2
from sluice_engine import core_messages
from sluice_engine.server.engine_server import EngineServer

RECORD = Path(__file__).with_name("drawn_streams.json")
NUM_RUNS, NUM_STEPS = 12, 120
CAUSES = ("prefill_done", "degrade", "backflow", "drain", "split", "manual")
WEIGHTS = {
    "submit": 16,
    "tokens": 24,
    "finish": 10,
    "hand_off": 4,
    "finish_handed_off": 5,
    "report": 10,
    "abort": 4,
    "grant": 5,
    "copy": 5,
    "configure": 4,
    "lose": 3,
    "attach": 5,
    "resume": 5,
    "usage": 3,
    "wait": 8,
    "refuse": 2,
    "leave": 1,
}
FLOAT = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


class Run:
    """One drawn run.

    Args:
        number: Tells runs apart.
    """

    def __init__(self, number: int) -> None:
        self.rng = random.Random(number)
        core, clock = Core(), Clock()
        hello = wire.EngineHello(engine_id="engine-1", epoch=7, fingerprint=FINGERPRINT, max_batch_tokens=512)
        self.engine = Engine(EngineServer(hello, core, Builder(), clock=clock, transport="tcp"), core, clock)
        self.routers: dict[str, Router] = {}
        # By the engine's id of a request: its router, its slot, how many tokens it has.
        self.running: dict[str, list[Any]] = {}
        self.held: dict[str, tuple[str, int]] = {}
        self.num_requests = self.num_iterations = self.generation = 0
        self.num_submits: dict[str, int] = {}
        self.free_slots: dict[str, int] = {}
        self.num_commands = self.num_aborts = 0
        self.steps: list[list[str]] = []

    async def go(self) -> list[list[str]]:
        for name in ("router-1", "router-2"):
            self.attach_router(name)
        for _ in range(NUM_STEPS):
            (action,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            await getattr(self, action)()
            await settle()
            self.engine.clock.now_s += self.rng.choice((0.0, 0.01, 0.03))
            self.end_step(action)
        return self.steps

    def end_step(self, action: str) -> None:
        core = self.engine.core
        lines = [f"{action} at {self.engine.clock.now_s}"]
        for name, router in self.routers.items():
            messages = (text_format.MessageToString(message, as_one_line=True) for message in router.receive())
            lines += [f"to {name}: {message}" for message in messages]
        lines += [f"command {command}" for command in core.commands[self.num_commands :]]
        lines += [f"abort {core_id}" for core_id in core.aborted[self.num_aborts :]]
        self.num_commands, self.num_aborts = len(core.commands), len(core.aborted)
        server = self.engine.server
        lines.append(
            f"{server.num_routers} routers, {server.num_requests} requests, {server.is_draining} {server.is_drained}"
            f" {server.counters}"
        )
        self.steps.append([FLOAT.sub(lambda found: f"{float(found[0]):.6g}", line) for line in lines])

    def pick_router(self) -> tuple[str, Router] | None:
        return self.rng.choice(list(self.routers.items())) if self.routers else None

    def pick(self, *, of: str | None = None) -> str | None:
        found = [core_id for core_id, (name, *_) in self.running.items() if of in (None, name)]
        return self.rng.choice(found) if found else None

    def attach_router(self, name: str) -> None:
        self.routers[name] = self.engine.attach(name)
        self.num_submits[name] = 0
        self.free_slots[name] = 0

    # What may happen

    async def submit(self) -> None:
        picked = self.pick_router()
        if picked is None:
            return
        name, router = picked
        submits = []
        for _ in range(self.rng.choice((1, 2))):
            self.num_requests += 1
            self.num_submits[name] += 1
            slot = self.free_slots[name]
            self.free_slots[name] += 1
            submits.append(
                submit(
                    slot,
                    f"r{self.num_requests}",
                    fence=self.rng.choice((1, 4)),
                    submit_number=self.num_submits[name],
                    prompt_token_ids=[1] * self.rng.choice((0, 3, 30, 3, 3)),
                    output_token_ids=self.rng.choice(([], [], [5, 6])),
                    is_recovery=self.rng.random() < 0.2,
                )
            )
        before = set(self.engine.core.requests)
        await router.send(submits=submits)
        for item in submits:
            core_id = next(
                (x for x in self.engine.core.requests if x not in before and x.startswith(f"{item.request_id}-")), ""
            )
            if core_id:
                self.running[core_id] = [name, item.slot, 0, item.request_id, item.fence, len(item.output_token_ids)]

    async def tokens(self) -> None:
        outputs = []
        for core_id, record in self.running.items():
            if self.rng.random() < 0.6:
                number = self.rng.choice((1, 1, 2))
                outputs.append(output(core_id, range(record[2], record[2] + number)))
                record[2] += number
        if outputs:
            self.num_iterations += 1
            self.engine.put_out(*outputs, report=self.make_report() if self.rng.random() < 0.8 else None)

    def make_report(self, **fields: Any) -> core_messages.SchedulerReport:
        rng = self.rng
        load = core_messages.SchedulerLoad(
            running_decodes=len(self.running),
            queued_prefill_tokens=rng.choice((0, 64)),
            queued_requests=rng.choice((0, 2)),
            kv_blocks_total=99,
            kv_blocks_used=rng.choice((3, 7)),
            kv_blocks_granted=rng.choice((0, 2)),
            chunk_size_tokens=256,
            generation=self.generation,
            num_moved_in=self.num_iterations // 9,
            saved_tpot_s=rng.choice((None, 0.25)),
            prefill_phase_s=rng.choice((0.0, 0.5)),
        )
        iteration = core_messages.IterationReport(
            number=self.num_iterations,
            prefill_tokens=rng.choice((0, 32)),
            attention_work=rng.choice((0.0, 512.0)),
            num_chunks=rng.choice((0, 1)),
            num_decodes=len(self.running),
            decode_context_tokens=30,
            duration_s=0.03,
        )
        numbers = {router.session.number: router.session.sent_submit_number for router in self.routers.values()}
        chosen = {number: count for number, count in numbers.items() if rng.random() < 0.5}
        return core_messages.SchedulerReport(
            load=load, iteration=rng.choice((iteration, None)), last_submit_numbers=chosen, **fields
        )

    async def report(self) -> None:
        rng, core_id = self.rng, self.pick()
        fields: dict[str, Any] = {}
        if core_id is not None and rng.random() < 0.7:
            kind = rng.choice(("proposals", "returned", "refused", "pulled_parts", "prefixes"))
            match kind:
                case "proposals":
                    move = core_messages.ProposedMove(
                        request_id=rng.choice((core_id, "gone-1")),
                        cause=rng.choice(CAUSES),
                        num_output_tokens=self.running[core_id][2],
                        num_blocks=3,
                    )
                    fields[kind] = [move]
                case "returned":
                    fields[kind] = [core_id]
                    del self.running[core_id]
                case "refused":
                    fields[kind] = [core_messages.RefusedHandOff(request_id=core_id, reason="preempted")]
                case "pulled_parts":
                    number = rng.choice(list(self.routers.values())).session.number if self.routers else 77
                    part = core_messages.PulledPart(
                        key=f"{number}.{rng.randrange(9)}",
                        num_tokens=rng.choice((0, 32)),
                        reason=rng.choice(("", "gap")),
                    )
                    fields[kind] = [part]
                case "prefixes":
                    stored, removed = rng.sample(range(100, 120), 2), rng.sample(range(200, 220), 1)
                    fields[kind] = core_messages.PrefixChanges(stored=stored, removed=removed)
        self.engine.put_out(report=self.make_report(**fields))

    async def finish(self) -> None:
        if (core_id := self.pick()) is not None:
            del self.running[core_id]
            reason = self.rng.choice((STOP, LENGTH, ERROR))
            stop = self.rng.choice((None, 17, "text")) if reason == STOP else None
            statistics = self.rng.choice((None, SimpleNamespace(num_local_cached_tokens=16)))
            tokens = self.rng.choice(((), (9,)))
            self.engine.put_out(
                output(core_id, tokens, finish_reason=reason, stop_reason=stop, prefill_stats=statistics)
            )

    async def hand_off(self) -> None:
        if (core_id := self.pick()) is None:
            return
        name, slot, *_, fence, _ = self.running[core_id]
        if name in self.routers:
            wrong = self.rng.choice((0, 0, 0, 1))
            await self.routers[name].send(
                hand_offs=[
                    wire.HandOff(slot=slot + 50 * wrong, fence=fence, num_output_tokens=self.rng.choice((0, 30))),
                    *([wire.HandOff(slot=slot, fence=fence + 1)] if self.rng.random() < 0.2 else []),
                ]
            )

    async def finish_handed_off(self) -> None:
        if (core_id := self.pick()) is not None:
            name, slot, *_ = self.running.pop(core_id)
            self.engine.put_out(
                output(core_id, (), finish_reason=LENGTH, kv_transfer_params={"sluice_num_tokens": 40, "where": 1})
            )
            await settle()
            if name in self.routers and self.rng.random() < 0.6:
                await self.routers[name].send(released_slots=[slot])

    async def abort(self) -> None:
        if (core_id := self.pick()) is not None:
            name, slot, *_ = self.running[core_id]
            if name in self.routers:
                del self.running[core_id]
                await self.routers[name].send(aborts=[wire.Abort(slot=slot)])

    async def grant(self) -> None:
        if (picked := self.pick_router()) is not None:
            number = self.rng.randrange(1, 9)
            request = wire.GrantRequest(
                grant_id=number, num_tokens=40, cause=self.rng.choice(wire.MoveCause.values()[1:])
            )
            await picked[1].send(grant_requests=[request])
            if self.rng.random() < 0.4:
                await picked[1].send(released_grant_ids=[number])

    async def copy(self) -> None:
        if (core_id := self.pick()) is None:
            return
        name, slot, *_, fence, _ = self.running[core_id]
        if name not in self.routers:
            return
        router, offer_id = self.routers[name], self.rng.randrange(1, 9)
        self.engine.core.answers[core_messages.OfferCommand] = core_messages.OfferAnswer(
            key=f"{router.session.number}.{offer_id}",
            num_tokens=32,
            transfer_params="{}",
            reason=self.rng.choice(("", "none")),
        )
        asked = wire.KvOfferRequest(
            offer_id=offer_id, slot=slot + self.rng.choice((0, 0, 60)), fence=fence, first_token=0
        )
        await router.send(kv_offer_requests=[asked])
        pull = wire.PartPull(grant_id=offer_id, token_ids=[1, 2])
        pull.kv.CopyFrom(
            wire.KvHandle(engine_id="x", fingerprint=self.rng.choice((FINGERPRINT, "other")), num_tokens=2)
        )
        await router.send(part_pulls=[pull])
        if self.rng.random() < 0.5:
            await router.send(released_offer_ids=[offer_id])

    async def configure(self) -> None:
        if (picked := self.pick_router()) is None:
            return
        self.generation += self.rng.choice((1, 1, 0, -1))
        await picked[1].send(
            configure=wire.Configure(
                cluster_uid=self.rng.choice(("u", "u", "u", "v")),
                generation=max(1, self.generation),
                role=self.rng.choice((plan_pb2.ROLE_PREFILL_HEAVY, plan_pb2.ROLE_DECODE_HEAVY)),
                chunk_size_tokens=self.rng.choice((0, 256)),
                is_draining=self.rng.random() < 0.2,
                strategy="taichi",
            )
        )

    async def lose(self) -> None:
        if (picked := self.pick_router()) is None:
            return
        name, router = picked
        router.lose_stream()
        del self.routers[name]
        for core_id, record in self.running.items():
            if record[0] == name:
                self.held[core_id] = (record[3], record[4])

    async def attach(self) -> None:
        free = [name for name in ("router-1", "router-2", "router-3") if name not in self.routers]
        if free:
            self.attach_router(self.rng.choice(free))

    async def resume(self) -> None:
        for core_id, (request_id, fence) in list(self.held.items()):
            record = self.running.get(core_id)
            name = record[0] if record else "router-1"
            if name not in self.routers or self.rng.random() < 0.4:
                continue
            del self.held[core_id]
            if self.rng.random() < 0.2:
                await self.routers[name].send(aborts=[wire.Abort(held_request_id=request_id)])
                self.running.pop(core_id, None)
                continue
            slot = self.free_slots[name]
            self.free_slots[name] += 1
            index = record[5] + self.rng.choice((record[2], max(0, record[2] - 1))) if record else 0
            wanted = fence + self.rng.choice((0, 0, 0, 1))
            await self.routers[name].send(
                resumes=[wire.Resume(slot=slot, request_id=request_id, fence=wanted, next_output_index=index)]
            )
            if record:
                record[1] = slot

    async def usage(self) -> None:
        if (picked := self.pick_router()) is not None:
            second = int(self.engine.clock.now_s)
            owner = wire.OwnerUsage(owner=self.rng.choice(("alice", "bob")), running=self.rng.choice((0, 1)))
            owner.seconds.add(second=second, requests=1, tokens=9)
            await picked[1].send(usage=wire.RouterUsage(second=second, number=self.num_requests, owners=[owner]))

    async def wait(self) -> None:
        self.engine.clock.now_s += self.rng.choice((0.1, 0.6, 3.0, 12.0))
        self.engine.server.tick(self.engine.clock.now_s)

    async def refuse(self) -> None:
        """The EngineCore refuses the next commands, or does not any more."""
        answers = self.engine.core.answers
        if core_messages.HandOffCommand in answers:
            answers.clear()
            return
        reason = self.rng.choice(("unknown", "prefill", "preempted"))
        answers[core_messages.HandOffCommand] = core_messages.HandOffAnswer(
            request_id=self.pick() or "gone-1", is_accepted=False, reason=reason
        )
        answers[core_messages.ConfigureCommand] = core_messages.ConfigureAnswer(
            generation=1, role="P-heavy", chunk_size_tokens=1, error="no such size"
        )

    async def leave(self) -> None:
        if self.num_requests > 60:
            self.engine.server.transport = "rdma"


@pytest.mark.parametrize("number", range(NUM_RUNS))
async def test_drawn_streams_are_served_as_recorded(number: int) -> None:
    steps = await Run(number).go()
    if os.environ.get("SLUICE_TELL") == str(number):
        for index, lines in enumerate(steps):
            print(f"step {index}", *lines, sep="\n  ")
    check_record(RECORD, str(number), steps)
