"""TaiChi's Algorithm 1 on real engines: decodes degrade and flow back, and no client notices.

There is one P-heavy and one D-heavy engine, with little KV. No test requests a move. A decode moves because a D-heavy
engine is above the watermark, or because its TPOT nears its objective beside the prefills of a P-heavy engine. The
router's decision log and counters say which decode moved, when and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import workload
from cluster import NotReachedError, Result, run_cluster
from prometheus_client.parser import text_string_to_metric_families
from strategy_cluster import WANTED_EVENTS, ask_until_seen, read_counter, use_strategy
from test_exactness import check
from workload import Request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from cluster import Client, Cluster
    from workload import Answer

    from sluice.v1 import router_pb2

pytestmark = pytest.mark.engine

Event = dict[str, Any]
Known = tuple[Request, "Answer"]
Move = tuple[str, str, str]  # cause, source, target

PORTS = "24000-24499"
HTTP_PORT = 24500
MIN_TOKENS_BETWEEN_MOVES = 16
DEADLINE_S = 120.0
NO_TPOT_MS = 60_000  # an objective that no stream here misses

# Sizes in blocks of 32 tokens. The watermark is 250 of 500 blocks. A long stream takes 65 to 124 and a filler 122 to
# 124: any two of the three stay below the watermark, and all three always pass it. So the choice of Algorithm 1 shows,
# however fast the machine is.
NUM_BLOCKS = 500
WATERMARK_PERCENT = 50
STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 2049, 1900
FILLER_PROMPT_TOKENS, FILLER_OUTPUT_TOKENS = 3900, 64
# Prompts that keep a P-heavy engine busy: each takes an iteration, and they do not all fit in its prefix cache.
BUSY_PROMPT_TOKENS, NUM_BUSY_PROMPTS = 2000, 16

# TPOT objective of the stream that shall flow back, as a multiple of a lone decode's TPOT on the D-heavy engine. It is
# far above the stream's TPOT there, and far below its TPOT beside whole prompts on the P-heavy engine.
TPOT_SLO_FACTOR = 4
# On a machine that stalls, a stream may end before it was seen where it should be: then the test tries other streams.
NUM_ATTEMPTS = 16
NUM_BUSY = 3
MARGIN_TOKENS = 16

# TPOT objectives under load, in milliseconds. On any machine, some of them lie between the TPOTs of the two engines.
TPOT_LADDER_MS = tuple(round(4 * 1.4**step) for step in range(16))
NUM_CONCURRENT = 32
NUM_ROUNDS = 20


@pytest.fixture(scope="module")
def flow_cluster(tmp_path_factory: pytest.TempPathFactory, example: dict[str, Any], models: Path) -> Iterator[Cluster]:
    """One P-heavy and one D-heavy engine with little KV; only the former runs prefills."""
    manifest = json.loads(json.dumps(example))
    manifest["metadata"]["name"] = "flow"
    spec = manifest["spec"]
    spec.update(replicas=2, prefillHeavy=1, chunkSizes={"prefillHeavy": 2048, "decodeHeavy": 0})
    spec["slo"] = {"ttftMilliseconds": 600_000, "tpotMilliseconds": NO_TPOT_MS}
    spec["parameters"].update(watermarkPercent=WATERMARK_PERCENT, minTokensBetweenMoves=MIN_TOKENS_BETWEEN_MOVES)
    # vLLM keeps one block for itself.
    spec["engine"].update(maxModelLen=4096, extraArgs=[f"--num-gpu-blocks-override={NUM_BLOCKS + 1}"])
    spec["router"].update(replicas=1, service={"port": HTTP_PORT})
    with run_cluster(tmp_path_factory.mktemp("flow"), manifest, models=models, ports=PORTS) as cluster:
        cluster.wait_ready()
        status = cluster.wait_idle()
        assert {engine["kv_blocks_total"] for engine in status["engines"]} == {NUM_BLOCKS}
        yield cluster


@pytest.fixture
def flowing(flow_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, idle with all blocks free before and after every test."""
    flow_cluster.wait_idle()
    yield flow_cluster
    flow_cluster.wait_ready()
    flow_cluster.wait_idle()


@dataclass(frozen=True, slots=True)
class Texts:
    """Greedy requests with the answers of stock vLLM.

    Args:
        first: A long stream.
        second: Another one.
        filler: Takes much KV for a short time.
        busy: Prompts with one output token.
    """

    first: Known
    second: Known
    filler: Known
    busy: list[Known]


@pytest.fixture(scope="session")
def texts(models: Path) -> Texts:
    sizes = {
        "first": (STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS),
        "second": (STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS),
        "filler": (FILLER_PROMPT_TOKENS, FILLER_OUTPUT_TOKENS),
        **{f"busy-{number}": (BUSY_PROMPT_TOKENS, 1) for number in range(NUM_BUSY_PROMPTS)},
    }
    requests = [
        Request(
            name=name,
            prompt_token_ids=workload.make_prompt(prompt_tokens, random.Random(number)),
            sampling={"temperature": 0.0, "max_tokens": output_tokens, "ignore_eos": True},
        )
        for number, (name, (prompt_tokens, output_tokens)) in enumerate(sizes.items())
    ]
    answers = workload.answers(models / "tiny", requests, models.parents[1] / "e2e")
    first, second, filler, *busy = zip(requests, answers, strict=True)
    return Texts(first, second, filler, busy)


@dataclass(slots=True)
class TimedResult(Result):
    """A result that records the time of its first token."""

    first_token_s: float = 0.0

    def take(self, delta: router_pb2.GenerateResponse) -> None:
        self.first_token_s = self.first_token_s or time.monotonic()
        Result.take(self, delta)

    @property
    def tpot_so_far_ms(self) -> float:
        """TPOT until now; it grows while no token comes."""
        return (time.monotonic() - self.first_token_s) * 1e3 / max(1, len(self.token_ids) - 1)


@dataclass(slots=True, eq=False)
class Stream:
    """A request that runs or has ended.

    Args:
        answer: The expected answer.
        result: The tokens so far.
        task: Reads the stream to its end, and checks it.
    """

    answer: Answer
    result: TimedResult
    task: asyncio.Task[None]

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def num_tokens(self) -> int:
        return len(self.result.token_ids)

    async def leave(self) -> None:
        """Cancel the request, as a client that disconnects does; its tokens so far must be right."""
        self.task.cancel()
        await asyncio.wait({self.task})
        assert self.result.token_ids == self.answer.token_ids[: self.num_tokens], self.name


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of one router, each checked when it ends, and the router's decisions about them.

    Args:
        client: The router's gRPC API.
        session: Client of its HTTP API.
        tasks: Runs the streams.
    """

    client: Client
    session: aiohttp.ClientSession
    tasks: asyncio.TaskGroup

    def start(self, known: Known, name: str, *, tpot_slo_ms: int = 0, max_tokens: int = 0) -> Stream:
        """Start a stream.

        Args:
            known: The request and its answer.
            name: Its id, unique.
            tpot_slo_ms: Its TPOT objective; 0 means that of the class.
            max_tokens: Ends it early, with a prefix of the answer (greedy requests only); 0 means the whole answer.
        """
        request, answer = known
        if max_tokens:
            request = replace(request, sampling={**request.sampling, "max_tokens": max_tokens})
            logprobs = None if answer.logprobs is None else answer.logprobs[:max_tokens]
            answer = replace(answer, token_ids=answer.token_ids[:max_tokens], logprobs=logprobs)
        result = TimedResult(name=name)

        async def run() -> None:
            await self.client.generate(replace(request, name=name), result=result, tpot_slo_ms=tpot_slo_ms)
            check(result, answer)

        return Stream(answer, result, self.tasks.create_task(run(), name=name))

    async def explain(self, stream: Stream) -> list[Event]:
        """List every decision about a request so far; empty until the router knows the request."""
        async with self.session.get(f"/debug/requests/{stream.name}") as answer:
            return list((await answer.json())["events"]) if answer.status == 200 else []

    async def list_moves(self, stream: Stream) -> list[Move]:
        """List cause, source and target of each of its moves."""
        return list_moves(await self.explain(stream))

    async def has_moved(self, cause: str, *streams: Stream, unless_ended: Stream | None = None) -> bool:
        """Wait until one of the streams has moved for this cause; False if all have ended, or ``unless_ended`` has."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                # Read before the moves: a stream that has ended by now has made all its moves.
                has_ended = all(stream.task.done() for stream in streams) or (
                    unless_ended is not None and unless_ended.task.done()
                )
                moves = [move for stream in streams for move in await self.list_moves(stream)]
                if any(move[0] == cause for move in moves):
                    return True
                if has_ended:
                    return False
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def repeating(self, known: list[Known], name: str, *, lanes: int = 1) -> AsyncIterator[None]:
        """Keep ``lanes`` of these requests running, in turn."""
        is_over = False

        async def repeat(lane: int) -> None:
            for number in itertools.count(lane, lanes):
                if is_over:
                    break
                await self.start(known[number % len(known)], f"{name}-{number}").task

        repeats = [self.tasks.create_task(repeat(lane)) for lane in range(lanes)]
        try:
            yield
        finally:
            is_over = True
        await asyncio.gather(*repeats)

    async def count_moves(self) -> Counter[str]:
        """Count completed moves by cause, since the router's start."""
        async with self.session.get("/metrics") as answer:
            families = list(text_string_to_metric_families(await answer.text()))
        moves: Counter[str] = Counter()
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "sluice_moves_total" and sample.labels["result"] == "done":
                moves[sample.labels["cause"]] += int(sample.value)
        return moves


@contextlib.asynccontextmanager
async def loaded(cluster: Cluster) -> AsyncIterator[Load]:
    """A load on the cluster's router; waits for all streams at its end."""
    async with (
        cluster.client() as client,
        aiohttp.ClientSession(cluster.url()) as session,
        asyncio.TaskGroup() as tasks,
    ):
        yield Load(client, session, tasks)


async def until(what: str, is_reached: Callable[[], bool]) -> None:
    """Wait for a condition on the streams."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not is_reached():  # noqa: ASYNC110  streams have no event for it
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise NotReachedError(what) from None


def list_moves(events: list[Event]) -> list[Move]:
    """List cause, source and target of each move."""
    return [(event["cause"], event["source"], event["target"]) for event in events if event["event"] == "moved"]


def name_engines(cluster: Cluster) -> tuple[str, str]:
    """Name the P-heavy and the D-heavy engine."""
    roles = {engine["role"]: engine["engine_id"] for engine in cluster.status()["engines"]}
    return roles["P-heavy"], roles["D-heavy"]


def check_pace(name: str, events: list[Event]) -> None:
    """Check the tokens between two moves: enough of them, unless TPOT has passed its objective (backflow only)."""
    slo_s = events[0]["tpot_slo_s"]
    first_token_s = next(event["at_s"] for event in events if event["event"] == "first_token")
    before: Event | None = None
    for event in (event for event in events if event["event"] == "handed_off"):
        gap = MIN_TOKENS_BETWEEN_MOVES if before is None else event["output_tokens"] - before["output_tokens"]
        if gap < MIN_TOKENS_BETWEEN_MOVES:
            assert event["cause"] == "backflow", f"{name}: {event['cause']} after {gap} tokens"
            proposed = [item for item in events if item["event"] == "proposed" and item["at_s"] <= event["at_s"]][-1]
            tpot_s = (proposed["at_s"] - first_token_s) / max(1, proposed["output_tokens"] - 1)
            assert tpot_s > slo_s, f"{name}: moved after {gap} tokens, with a TPOT of {tpot_s:.4f} s of {slo_s} s"
        before = event


def list_degrades(events: list[Event]) -> list[float]:
    """List when a request was proposed to degrade; where nothing is granted, the next longest is proposed."""
    return [event["at_s"] for event in events if event["event"] == "proposed" and event["cause"] == "degrade"]


def count_degrades(events: list[Event]) -> int:
    """Count how often a request was proposed to degrade."""
    return len(list_degrades(events))


def had_ended_before(first: list[Event], second: list[Event]) -> bool:
    """Whether a request had ended when another was first proposed to degrade: then it was the longest no more."""
    (ended_s,) = (event["at_s"] for event in first if event["event"] == "finished")
    return ended_s <= min(list_degrades(second))


async def test_the_longest_output_leaves_a_d_heavy_engine_above_the_watermark(flowing: Cluster, texts: Texts) -> None:
    p_heavy, d_heavy = name_engines(flowing)
    async with loaded(flowing) as load:
        for attempt in range(NUM_ATTEMPTS):
            before = await load.count_moves()
            first = load.start(texts.first, f"long-{attempt}")
            await until("the first stream decodes", lambda: first.num_tokens >= 64)  # noqa: B023
            second = load.start(texts.second, f"short-{attempt}")
            await settle(load, first, second)
            async with load.repeating([texts.filler], f"filler-{attempt}"):
                is_seen = await load.has_moved("degrade", first, second)
            await asyncio.gather(first.task, second.task)
            stories = [await load.explain(stream) for stream in (first, second)]
            num_degrades = [count_degrades(story) for story in stories]
            assert num_degrades[0] > 0 or num_degrades[1] == 0 or had_ended_before(*stories)
            if is_seen and num_degrades[1] == 0:
                break
        moves = {stream: await load.list_moves(stream) for stream in (first, second)}
        after = await load.count_moves()
    home = ("prefill_done", p_heavy, d_heavy)
    assert moves[first][:2] == [home, ("degrade", d_heavy, p_heavy)]
    assert moves[second] == [home]
    assert (after - before)["degrade"] == 1


@pytest.mark.timeout(600)
async def test_a_decode_that_nears_its_objective_flows_back_and_counts_as_short_again(
    flowing: Cluster, texts: Texts
) -> None:
    """After the backflow it no longer counts as the longest output, although its whole answer is longer."""
    p_heavy, d_heavy = name_engines(flowing)
    share = 0.7  # share of its objective that the first stream's TPOT must reach before the second begins
    async with loaded(flowing) as load:
        probe = load.start(texts.first, "probe", max_tokens=100)
        await probe.task
        slo_ms = math.ceil(TPOT_SLO_FACTOR * probe.result.tpot_ms)
        for attempt in range(NUM_ATTEMPTS):
            first, second = await flow_one_back(load, texts, str(attempt), slo_ms, share)
            lead = await compare_lengths(load, first, second)
            if lead == 0:
                num_before = count_degrades(await load.explain(first))
                async with load.repeating([texts.filler], f"filler-again-{attempt}"):
                    is_seen = await has_degraded_again(load, first, second)
                num_degrades = [count_degrades(await load.explain(stream)) for stream in (first, second)]
                if is_seen and num_degrades[0] == num_before:
                    break
                # The other one counts as longer: it is proposed first, and this one only where that was not granted.
                assert num_degrades[0] == num_before or num_degrades[1] > 0
            moves = [move[0] for move in await load.list_moves(first)]
            if "degrade" not in moves:
                slo_ms = math.ceil(1.4 * slo_ms)  # it would flow back at once, and so never degrades
            elif "backflow" not in moves:
                slo_ms = math.ceil(0.7 * slo_ms)  # the machine has become faster since the measurement
            else:
                share += 0.08 * lead
            await asyncio.gather(first.leave(), second.leave())
        else:
            pytest.fail(f"no stream that flowed back met one to compare it with in {NUM_ATTEMPTS} attempts")
        await asyncio.gather(first.task, second.task)
        stories = {stream.name: await load.explain(stream) for stream in (first, second)}
    home, degraded = ("prefill_done", p_heavy, d_heavy), ("degrade", d_heavy, p_heavy)
    assert list_moves(stories[first.name]) == [home, degraded, ("backflow", p_heavy, d_heavy)]
    assert list_moves(stories[second.name])[:2] == [home, degraded]
    for name, story in stories.items():
        check_pace(name, story)


async def settle(load: Load, *streams: Stream) -> None:
    """Wait until each stream decodes where it should, for so long that it may move again, or has ended."""
    for stream in streams:
        await load.has_moved("prefill_done", stream)
        num_tokens = stream.num_tokens + 2 * MIN_TOKENS_BETWEEN_MOVES
        await until("it decodes", lambda: stream.num_tokens >= num_tokens or stream.task.done())  # noqa: B023


async def flow_one_back(load: Load, texts: Texts, suffix: str, slo_ms: int, share: float) -> tuple[Stream, Stream]:
    """Make a stream degrade and flow back, and start another shortly before it is back.

    Args:
        load: Runs the streams.
        texts: Their requests.
        suffix: Suffix of their names.
        slo_ms: TPOT objective of the first stream.
        share: Share of it that the first stream's TPOT must reach before the second begins.

    Returns:
        Both streams. The first one may not have flowed back.
    """
    first = load.start(texts.first, f"first-{suffix}", tpot_slo_ms=slo_ms)
    await until("the first stream decodes", lambda: first.num_tokens >= 64)
    other = load.start(texts.second, f"other-{suffix}")
    await settle(load, first, other)
    async with load.repeating([texts.filler], f"filler-{suffix}"):
        await load.has_moved("degrade", first)
    await other.leave()
    async with load.repeating(texts.busy, f"busy-{suffix}", lanes=NUM_BUSY):
        await until("it slows down", lambda: first.result.tpot_so_far_ms > share * slo_ms or first.task.done())
        second = load.start(texts.second, f"second-{suffix}")
        await load.has_moved("backflow", first, unless_ended=second)
    await settle(load, second)
    return first, second


async def compare_lengths(load: Load, first: Stream, second: Stream) -> int:
    """Check that the length since the backflow and the whole length lead to different choices.

    From here on both decodes gain a token per iteration of the D-heavy engine, so the longer one stays longer.

    Returns:
        0 if they do; 1 if the second decode began too early; -1 if it began too late, or nothing flowed back.
    """
    moves = [event for event in await load.explain(first) if event["event"] == "handed_off"]
    reset_at = next((event["output_tokens"] for event in moves if event["cause"] == "backflow"), None)
    num_tokens, other_tokens = first.num_tokens, second.num_tokens
    print(f"{first.name} flowed back with {reset_at} tokens and has {num_tokens}; {second.name} has {other_tokens}")
    if reset_at is None or first.task.done() or second.task.done() or len(moves) > 3:
        return -1
    if num_tokens - reset_at < 2 * MIN_TOKENS_BETWEEN_MOVES or other_tokens < num_tokens - reset_at + MARGIN_TOKENS:
        return -1
    return 0 if other_tokens < num_tokens - MARGIN_TOKENS else 1


async def has_degraded_again(load: Load, first: Stream, second: Stream) -> bool:
    """Wait until one of two decodes has degraded, the first one for the second time; False if both ended before."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            has_ended = first.task.done() or second.task.done()
            moves = await load.list_moves(first) + await load.list_moves(second)
            if [move[0] for move in moves].count("degrade") > 1:
                return True
            if has_ended:
                return False
            await asyncio.sleep(0.02)


async def test_flow_under_load_is_exact_and_keeps_its_pace(flowing: Cluster, known: list[Known], texts: Texts) -> None:
    """Both engines run prefills, and decodes move in both directions at once."""
    flowing.edit(lambda spec: spec["chunkSizes"].update(decodeHeavy=64))
    flowing.wait("the edit is in force", lambda s: {e["chunk_size_tokens"] for e in s["engines"]} == {64, 2048})
    large = [pair for pair in known if pair[0].sampling["max_tokens"] >= 120 and len(pair[0].prompt_token_ids) >= 255]
    moved_before = count_moved_in(flowing.status())
    async with loaded(flowing) as load:
        before = await load.count_moves()
        seen: Counter[str] = Counter()
        for number in range(NUM_ROUNDS):
            async with load.repeating(texts.busy, f"busy-{number}"):
                streams = [
                    load.start(
                        large[(number * NUM_CONCURRENT + index) % len(large)],
                        f"round-{number}-{index}",
                        tpot_slo_ms=TPOT_LADDER_MS[index % len(TPOT_LADDER_MS)],
                    )
                    for index in range(NUM_CONCURRENT)
                ]
                await asyncio.gather(*(stream.task for stream in streams))
            for stream in streams:
                story = await load.explain(stream)
                check_pace(stream.name, story)
                seen.update({move[0] for move in list_moves(story)})
            if seen["degrade"] and seen["backflow"]:
                break
        after = await load.count_moves()
    print(f"requests moved by cause: {dict(seen)} in {number + 1} rounds; moves {dict(after - before)}")
    assert seen["degrade"]
    assert seen["backflow"]
    assert after["degrade"] - before["degrade"] >= seen["degrade"]
    assert after["backflow"] - before["backflow"] >= seen["backflow"]
    num_moves = (after - before).total()
    flowing.wait("the status counts the moves", lambda s: count_moved_in(s) - moved_before >= num_moves)


async def test_load_alone_moves_decodes_with_default_parameters(two_engines: Cluster, known_long: list[Known]) -> None:
    use_strategy(two_engines, "TaiChi")

    async def count_degraded() -> int:
        return await read_counter(two_engines, "sluice_moves_total", 'cause="degrade",result="done"')

    longest = [(request, answer) for request, answer in known_long if len(answer.token_ids) > 200]
    moves = await ask_until_seen(two_engines, longest, NUM_CONCURRENT, count_degraded)
    print(f"decodes moved from a D-heavy engine above the watermark: {moves}")
    assert moves >= WANTED_EVENTS
    two_engines.wait_idle()


def count_moved_in(status: dict[str, Any]) -> int:
    return sum(engine["num_moved_in"] for engine in status["engines"])
