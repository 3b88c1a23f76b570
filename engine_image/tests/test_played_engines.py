"""Drawn work for two played engines: all that they answer and report is as it was when the record was written.

Beside it hold rules of their own: every token is exact wherever it is computed, and no block leaks.
``played_engines.json`` has a short hash of what came of each step. After a change of behaviour that is wanted,
write the record anew, and say in the commit what changed:

    SLUICE_WRITE_RECORDS=1 .venv/bin/python -m pytest -n0 engine_image/tests/test_played_engines.py

``SLUICE_TELL=NAME`` prints a scenario's steps, to compare two versions of the code.
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from played_engines import BLOCK, HandTime, PlayedEngine, PlayedRequest, expected_output, import_vllm
from recorded_steps import check_record, shorten

from sluice_core.strategies import STRATEGIES
from sluice_engine import core_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD = Path(__file__).with_name("played_engines.json")
NUM_STEPS = 90
HASHES = re.compile(r"(stored|removed)=\[([^]]*)\]")
FLOAT = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
CAUSES = ("prefill_done", "degrade", "backflow", "drain", "manual")
WEIGHTS = {
    "submit": 14,
    "step": 40,
    "move": 10,
    "copy": 6,
    "abort": 2,
    "grant": 3,
    "configure": 4,
    "recover": 3,
    "read_load": 3,
    "pass_time": 3,
    "silence": 1,
    "release": 2,
    "spoil": 1,
}
# Seconds of an iteration; bytes of KV of 60 and 20 blocks; 16 tokens take 0.16 s over the link.
FIELDS = {"base_s": 0.03, "chunk_s": 0.05, "kv_bytes_per_token": 10**6, "link_bytes_per_s": 1e8}
BLOCK_BYTES = (1 << 20) // 84


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a run is made of: strategies of its plans, weights of what happens, and whether iterations overlap."""

    strategies: tuple[str, ...] = ("taichi",)
    weights: dict[str, int] = field(default_factory=dict)
    is_ahead: bool = False
    is_small: bool = False


SCENARIOS = {
    "taichi": Scenario(),
    "taichi, ahead": Scenario(is_ahead=True),
    "taichi, little room": Scenario(is_small=True, weights={"submit": 25}),
    "taichi, little room, ahead": Scenario(is_small=True, is_ahead=True, weights={"submit": 25}),
    "moves": Scenario(weights={"move": 30, "copy": 25, "configure": 1}),
    "moves, ahead": Scenario(is_ahead=True, weights={"move": 30, "copy": 25, "configure": 1}),
    "moves, little room": Scenario(is_small=True, weights={"move": 30, "copy": 25, "silence": 3}),
    "aggregated": Scenario(("aggregated",)),
    "disaggregated": Scenario(("disaggregated",)),
    "dynaserve": Scenario(("dynaserve",)),
    "flowprefill": Scenario(("flowprefill",), is_small=True, weights={"submit": 25}),
    "ecoserve": Scenario(("ecoserve",), weights={"submit": 25}),
    "sluice": Scenario(("sluice",)),
    "switches": Scenario(tuple(STRATEGIES), weights={"configure": 14}),
    "switches, little room, ahead": Scenario(
        tuple(STRATEGIES), weights={"configure": 14}, is_small=True, is_ahead=True
    ),
}


class Run:
    """One drawn run on a pair of engines."""

    def __init__(self, name: str, engines: list[PlayedEngine], clock: HandTime) -> None:
        self.scenario = SCENARIOS[name]
        self.rng = random.Random(name)
        self.engines, self.clock = engines, clock
        self.generation = max(engine.load().generation for engine in engines)
        self.num_keys = 0
        self.num_submits = 0
        self.prefix = [self.rng.randrange(3, 2000) for _ in range(200)]
        self.steps: list[list[str]] = []
        for engine in engines:
            engine.requests.clear()
            engine.told.clear()

    def go(self) -> list[list[str]]:
        self.configure_all(is_plain=True)
        self.end_step("begin")
        weights = {**WEIGHTS, **self.scenario.weights}
        for _ in range(NUM_STEPS):
            (action,) = self.rng.choices(list(weights), list(weights.values()))
            getattr(self, action)()
            self.end_step(action)
        self.settle()
        self.end_step("settle")
        return self.steps

    def end_step(self, action: str) -> None:
        lines = [f"{action} at {self.clock.now_s}"]
        for engine in self.engines:
            lines += engine.told
            engine.told.clear()
        # Generations, requests and iterations count on from run to run.
        self.steps.append([self.normalize(line) for line in lines])

    def normalize(self, line: str) -> str:
        line = re.sub(r"generation=\d+", "generation=_", line)
        line = re.sub(r"\bnumber=\d+", "number=_", line)
        # Prefixes have other hashes in each process.
        line = HASHES.sub(lambda found: f"{found[1]}={len(found[2].split(',')) if found[2] else 0}", line)
        return FLOAT.sub(lambda found: f"{float(found[0]):.6g}", line)

    def pick(self, *, is_running: bool = False) -> tuple[PlayedEngine, PlayedRequest] | None:
        found = [
            (engine, request)
            for engine in self.engines
            for request in engine.requests.values()
            if not request.is_over and (request.tokens or not is_running)
        ]
        return self.rng.choice(found) if found else None

    def make_extras(self, **fields: Any) -> core_messages.RequestExtras:
        self.num_submits += 1
        return core_messages.RequestExtras(
            stream_number=self.rng.choice((1, 2)),
            submit_number=self.num_submits,
            ttft_slo_s=self.rng.choice((0.2, 2.0, 20.0)),
            tpot_slo_s=self.rng.choice((0.0, 0.035, 0.1)),
            arrival_s=self.rng.choice((None, self.clock.now_s - 0.1)),
            **fields,
        )

    # What may happen

    def submit(self) -> None:
        for _ in range(self.rng.choice((1, 2))):
            length = self.rng.choice((1, 15, 16, 17, 33, 64, 130))
            prompt = [*self.prefix[:length]] if self.rng.random() < 0.5 else self.rng.sample(range(3, 2000), length)
            split = self.rng.choice((0, 0, 5)) if "dynaserve" in self.scenario.strategies else 0
            self.rng.choice(self.engines).submit(
                prompt,
                self.make_extras(split_output_tokens=split),
                priority=self.rng.choice((0, 0, -3, 2)),
                max_tokens=self.rng.choice((1, 2, 10, 30, 60)),
                cache_salt=self.rng.choice((None, None, None, "salt")),
            )

    def step(self) -> None:
        for _ in range(self.rng.choice((1, 2, 5))):
            for engine in self.engines:
                engine.step()

    def move(self) -> None:
        """Moves a decode to the other engine, as a router does."""
        found = self.pick(is_running=True)
        if found is None:
            self.step()
            return
        source, request = found
        target = self.engines[1 - self.engines.index(source)]
        key = self.ask_for_room(target, len(request.prompt) + len(request.output) + 8)
        at = self.rng.choice((0, 0, len(request.output) + 2))
        command = core_messages.HandOffCommand(request_id=request.request_id, num_output_tokens=at)
        if key and source.command(command).is_accepted:
            self.wait_for_hand_off(source, target, request, key)
        elif key and self.rng.random() < 0.7:
            target.command(core_messages.ReleaseGrantCommand(key=key))

    def ask_for_room(self, target: PlayedEngine, num_tokens: int) -> str:
        self.num_keys += 1
        key = f"key-{self.num_keys}"
        command = core_messages.GrantCommand(
            key=key, num_tokens=num_tokens, cause=self.rng.choice(CAUSES), ttl_s=self.rng.choice((0.05, 2.0, 2.0))
        )
        return key if target.command(command).is_granted else ""

    def wait_for_hand_off(self, source: PlayedEngine, target: PlayedEngine, request: PlayedRequest, key: str) -> None:
        for _ in range(8):
            if request.is_over or request.request_id in source.refused:
                break
            source.step()
        if request.handed_off is None:
            if self.rng.random() < 0.8:
                target.command(core_messages.ReleaseGrantCommand(key=key))
            return
        if self.rng.random() < 0.1:
            source.command(core_messages.ReleaseCommand(request_id=request.request_id))
        extras = self.make_extras(
            output_token_ids=request.output,
            transfer_params=request.handed_off.transfer_params,
            grant_key=self.rng.choice((key, key, key, "")),
            first_token_s=self.clock.now_s - 0.3,
            output_tokens_since_reset=self.rng.choice((0, len(request.output))),
        )
        target.submit(request.prompt, extras, max_tokens=len(request.output) + self.rng.choice((1, 5, 30)))

    def copy(self) -> None:
        """Copies the full blocks of a decode to the other engine while it goes on, in parts; then moves it."""
        found = self.pick(is_running=True)
        if found is None:
            self.step()
            return
        source, request = found
        target = self.engines[1 - self.engines.index(source)]
        key = self.ask_for_room(target, len(request.prompt) + len(request.output) + 3 * BLOCK)
        if not key:
            return
        num_copied = 0
        for part in range(self.rng.choice((1, 2))):
            offer = source.command(
                core_messages.OfferCommand(key=f"{key}.{part}", request_id=request.request_id, first_token=num_copied)
            )
            if offer.reason:
                break
            tokens = [*request.prompt, *request.output][num_copied : offer.num_tokens]
            command = core_messages.PullPartCommand(key=key, token_ids=tokens, transfer_params=offer.transfer_params)
            target.command(command)
            num_copied = offer.num_tokens
            for _ in range(self.rng.choice((1, 4))):
                source.step()
                target.step()
            if self.rng.random() < 0.5:
                source.command(core_messages.ReleaseOfferCommand(key=f"{key}.{part}"))
        command = core_messages.HandOffCommand(request_id=request.request_id)
        if self.rng.random() < 0.8 and source.command(command).is_accepted:
            self.wait_for_hand_off(source, target, request, key)
        elif self.rng.random() < 0.5:
            target.command(core_messages.ReleaseGrantCommand(key=key))

    def abort(self) -> None:
        if (found := self.pick()) is not None:
            found[0].abort(found[1])

    def grant(self) -> None:
        """A grant that nobody uses."""
        self.ask_for_room(self.rng.choice(self.engines), self.rng.choice((1, 30, 200)))

    def release(self) -> None:
        for engine in self.engines:
            for request in engine.requests.values():
                if request.handed_off is not None and self.rng.random() < 0.5:
                    engine.command(core_messages.ReleaseCommand(request_id=request.request_id))

    def configure(self) -> None:
        self.configure_all(is_plain=False)

    def configure_all(self, *, is_plain: bool, strategy: str = "") -> None:
        self.generation += self.rng.choice((1, 1, 1, 0, -1)) if not is_plain else 1
        strategy = strategy or self.rng.choice(self.scenario.strategies)
        for engine, role in zip(self.engines, ("P-heavy", "D-heavy"), strict=True):
            size = self.rng.choice((0, 16, 40, 256, 999)) if not is_plain else (256, 48)[role == "D-heavy"]
            command = core_messages.ConfigureCommand(
                generation=self.generation,
                role=role if is_plain else self.rng.choice(("P-heavy", "D-heavy")),
                chunk_size_tokens=size,
                is_draining=not is_plain and self.rng.random() < 0.15,
                strategy=strategy,
                chunk_sizes_tokens=self.rng.choice(([48, 256], [size], [])),
            )
            engine.command(command)

    def recover(self) -> None:
        """A request whose KV is lost goes on on any engine."""
        if (found := self.pick(is_running=True)) is not None:
            engine, request = found
            engine.abort(request)
            extras = self.make_extras(
                output_token_ids=request.output, is_recovery=True, first_token_s=self.clock.now_s - 0.2
            )
            self.rng.choice(self.engines).submit(request.prompt, extras, max_tokens=len(request.output) + 9)

    def read_load(self) -> None:
        for engine in self.engines:
            engine.command(core_messages.ReadLoadCommand())
            engine.tell(f"waits {engine.core.scheduler.find_wait_s()}")

    def pass_time(self) -> None:
        self.clock.pass_time(self.rng.choice((0.05, 0.5, 3.0, 31.0)))

    def silence(self) -> None:
        """An engine's KV port answers no more, or again."""
        engine = self.rng.choice(self.engines)
        engine.port.is_silent = not engine.port.is_silent

    def spoil(self) -> None:
        """Handles that no engine has written."""
        engine = self.rng.choice(self.engines)
        extras = self.make_extras(
            output_token_ids=expected_output(self.prefix[:40], 3, engine),
            transfer_params=self.rng.choice(("{}", "no JSON", '{"sluice_num_tokens": 42}')),
            first_token_s=self.clock.now_s,
        )
        engine.submit(self.prefix[:40], extras, max_tokens=8)

    def settle(self) -> None:
        """Everything ends, and every block is free again."""
        for engine in self.engines:
            engine.port.is_silent = False
        self.configure_all(is_plain=True, strategy="aggregated")
        for _ in range(300):
            self.step()
            if all(request.is_over for engine in self.engines for request in engine.requests.values()):
                break
        for _ in range(3):
            # Leases, grants and late pulls end.
            self.clock.pass_time(40.0)
            self.engines[0].submit([5], self.make_extras(), max_tokens=3)
            self.engines[1].submit([5], self.make_extras(), max_tokens=3)
            for _ in range(12):
                for engine in self.engines:
                    engine.step()
        for engine in self.engines:
            for request in engine.requests.values():
                assert request.is_over, request
                assert request.output == expected_output(request.prompt, len(request.output), engine)
            load = engine.load()
            assert (load.kv_blocks_used, load.kv_blocks_granted, load.kv_blocks_pinned) == (0, 0, 0), load
            assert (load.running_decodes, load.queued_requests, load.pulling_requests) == (0, 0, 0), load
            engine.core.reset_prefix_cache()
            engine.refused.clear()


@pytest.fixture
def clock() -> Iterator[HandTime]:
    """Time in hand, which starts anew with each run."""
    import_vllm()
    clock = HandTime()
    with clock.in_hand():
        yield clock


def make_pair(scenario: Scenario, model: Path) -> list[PlayedEngine]:
    fields = FIELDS | {"kv_bytes": BLOCK_BYTES * (28 if scenario.is_small else 70)}
    return [
        PlayedEngine(name, port, model, is_ahead=scenario.is_ahead, **fields)
        for name, port in (("left", 61001), ("right", 61002))
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_drawn_work_is_done_as_recorded(name: str, tiny_model: Path, clock: HandTime) -> None:
    steps = Run(name, make_pair(SCENARIOS[name], tiny_model), clock).go()
    if os.environ.get("SLUICE_TELL") == name:
        for number, lines in enumerate(steps):
            print(f"step {number}", *lines, sep="\n  ")
    check_record(RECORD, name, steps)


@pytest.mark.parametrize(
    ("prompts", "pairs"),
    [
        ([200], [200 * 100]),
        ([300], [256 * 128, 44 * (256 + 22)]),
        ([100, 80], [100 * 50 + 80 * 40]),
        ([200, 100], [200 * 100 + 56 * 28, 44 * (56 + 22)]),
    ],
    ids=["whole", "in two parts", "two whole", "two, one in parts"],
)
def test_each_token_of_a_prompt_reads_those_before_it(
    prompts: list[int], pairs: list[int], tiny_model: Path, clock: HandTime
) -> None:
    """An iteration has at most 256 tokens; this emulated GPU has time for pairs of tokens alone."""
    engine = PlayedEngine("left", 61001, tiny_model, is_ahead=False, attention_s=1e-6, kv_bytes=BLOCK_BYTES * 70)
    requests = [
        engine.submit(range(first, first + tokens), core_messages.RequestExtras(), max_tokens=1)
        for first, tokens in zip((5, 500), prompts, strict=False)
    ]
    durations_s = []
    while not all(request.is_over for request in requests):
        begun_s = clock.now_s
        engine.step()
        durations_s.append(clock.now_s - begun_s)
    assert durations_s == pytest.approx([1e-6 * number for number in pairs])


@pytest.mark.parametrize("check", ["check_installed", "check_scheduler"])
def test_a_vllm_that_we_do_not_know_is_refused(check: str, tiny_model: Path, clock: HandTime, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise LookupError("another vLLM")

    monkeypatch.setattr(import_vllm().scheduler.vllm_internals_check, check, refuse)
    with pytest.raises(LookupError, match="another vLLM"):
        make_pair(SCENARIOS["taichi"], tiny_model)


def test_what_an_engine_does_can_be_recorded(tiny_model: Path, clock: HandTime, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_RECORD", str(tmp_path))
    engines = make_pair(SCENARIOS["moves"], tiny_model)
    Run("moves", engines, clock).go()
    for engine in engines:
        engine.core.scheduler._recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "left-1.jsonl").read_text().splitlines()]
    assert {line[0] for line in lines} == {"plan", "request", "batch", "end", "hand-off"}
    assert lines[0] == ["plan", 5000.0, "P-heavy", 256]
    assert shorten([str(line) for line in lines]) == json.loads(RECORD.read_text())["recorded"]
