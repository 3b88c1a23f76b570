"""Constraints are compiled in processes that end when one takes too much."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from edge_fakes import FakePlane, say
from http_requests_harness import make_completion, serving_client

from sluice_router.text import grammar_process
from sluice_router.text.grammar_check import GrammarError
from sluice_router.text.grammar_process import GrammarProcess, check_grammar_apart

if TYPE_CHECKING:
    import httpx

# The library compares each pair of these names, which takes it half a minute.
NAMES = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)][:400]
SLOW = {"type": "object", "patternProperties": {f"^{name * 2}.*": {"type": "string"} for name in NAMES}}
# In a few words, what takes it minutes.
SLOW_AND_SHORT = {"allOf": [{"type": "string", "pattern": f".*{name}.*"} for name in NAMES[::17]]}


@pytest.mark.parametrize("schema", [SLOW, SLOW_AND_SHORT], ids=["long", "short"])
def test_a_constraint_that_takes_too_long_is_refused_and_the_next_one_is_not(schema: dict[str, Any]) -> None:
    begun_s = time.process_time()
    with pytest.raises(GrammarError, match="it takes more than 1 s of CPU time"):
        check_grammar_apart("json", json.dumps(schema))
    # None of it was this process's own.
    assert time.process_time() - begun_s < 0.5
    check_grammar_apart("regex", "ab")
    with pytest.raises(GrammarError, match="unclosed group"):
        check_grammar_apart("regex", "(a")


def test_a_process_that_somebody_ended_is_replaced_and_a_constraint_asks_for_no_more_than_two() -> None:
    check_grammar_apart("regex", "ab")
    first = grammar_process._of_thread.process
    os.kill(first.pid, signal.SIGKILL)
    check_grammar_apart("regex", "ab")
    assert grammar_process._of_thread.process.pid != first.pid
    # Nobody's fault but the library's, or the memory's.
    with pytest.raises(GrammarError, match=r"too much memory, or more than the library can do \(exit status 1\)"):
        check_grammar_apart("regex", 5)


def test_each_thread_has_a_process_and_one_of_its_own() -> None:
    barrier = threading.Barrier(2)

    def check() -> int:
        barrier.wait(10)
        check_grammar_apart("regex", "ab")
        process = grammar_process._of_thread.process
        del grammar_process._of_thread.process
        assert process.close() == 0
        return process.pid

    with ThreadPoolExecutor(2) as pool:
        pids = {future.result() for future in [pool.submit(check) for _ in range(2)]}
    assert len(pids) == 2


def test_a_process_ends_with_whoever_started_it() -> None:
    process = GrammarProcess()
    assert process.check("regex", "ab") is None
    assert process.close() == 0


async def test_other_requests_are_answered_while_a_constraint_is_compiled(text) -> None:
    plane = FakePlane(say(text, "hello"))
    async with serving_client(plane, text) as client:
        await client.post("/v1/completions", json=make_completion(guided_regex="ab"))
        body = make_completion(structured_outputs={"json": SLOW_AND_SHORT})
        slow = asyncio.create_task(client.post("/v1/completions", json=body, timeout=60))
        others: list[httpx.Response] = []
        while not slow.done():
            others.append(await client.post("/v1/completions", json=make_completion(guided_regex="ab"), timeout=60))
            await asyncio.sleep(0.05)
        refused = (await slow).json()["error"]
    assert ((await slow).status_code, refused["param"]) == (400, "structured_outputs.json")
    assert "it takes more than 1 s of CPU time" in refused["message"]
    assert len(others) > 3
    assert {answer.status_code for answer in others} == {200}
