"""A router that splits the CPU time of its event loop by stages, from its first request to its end.

    python traced_router.py --split OUT.json [ARGUMENTS OF THE ROUTER]

A stage is a set of functions. Their time counts once, without that of other stages that they call. What belongs to
none is the event loop, with accepted connections and timers. The clock itself is in the figures, at each switch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

API = "sluice_router.api"
# Stage: its functions, as MODULE:CLASS.METHOD. A function is replaced in the module that calls it.
STAGES: dict[str, tuple[str, ...]] = {
    "HTTP framework": (
        f"{API}.http.http_connection:EdgeConnection.data_received",
        "aiohttp.web_protocol:RequestHandler.start",
        "aiohttp.web_protocol:RequestHandler.finish_response",
    ),
    "request": (f"{API}.http.http_api:HttpApi._handle",),
    "body validation": (f"{API}.http.http_api:parse_completion", f"{API}.http.http_api:parse_chat"),
    "preparation": (
        f"{API}.request_preparation:RequestPreparer.prepare_completion",
        f"{API}.request_preparation:RequestPreparer.prepare_chat",
    ),
    "chat template": (f"{API}.request_preparation:RequestPreparer._render",),
    "tokenizing": ("sluice_router.text.tokenizer:ModelText._encode_fast",),
    "answer": (f"{API}.http.http_generation:HttpGeneration.answer",),
    "admission": ("sluice_router.scheduling.router:Router.admit",),
    "protobuf, HTTP/2 out": ("sluice_router.engines.engine_connections:EngineConnections.send",),
    "response head": (
        f"{API}.http.http_generation:HttpGeneration._open",
        "aiohttp.web_response:StreamResponse.prepare",
    ),
    "protobuf, HTTP/2 in": (
        "sluice_router.engines.engine_stream:EngineStream.data_received",
        "sluice_router.engines.engine_stream:EngineStream._handle_next",
    ),
    "tokens, reports, ends": ("sluice_router.scheduling.router:Router.handle_message",),
    "ticks": ("sluice_router.scheduling.router:Router.tick",),
    "events": (
        f"{API}.http.response_streams:SseResponseStream.open",
        f"{API}.http.response_streams:SseResponseStream.flush",
        f"{API}.http.response_streams:SseResponseStream.on_finished",
        f"{API}.http.response_streams:WholeResponseStream.on_finished",
        f"{API}.http.response_streams:WholeAnswer.wait",
    ),
    "writes to clients": (f"{API}.http.http_stream:HttpStream._send",),
}
REQUESTS = "request"
LOOP = "event loop"
OTHER_THREADS = " (thread)"


class StageClock:
    """Adds the CPU time of the thread that made it up by stages. Mutable.

    Attributes:
        spent_ns: Nanoseconds of CPU by stage.
        calls: Calls of a stage's functions from outside of it.
    """

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._stack = [LOOP]
        self._has_begun = False
        self._switched_ns = time.thread_time_ns()
        self._thread = threading.get_ident()

    def enter(self, stage: str) -> None:
        """Begins a stage within the present one."""
        if threading.get_ident() != self._thread:
            return
        self._charge()
        if stage == REQUESTS and not self._has_begun:
            self._has_begun = True
            self.spent_ns.clear()
        self._stack.append(stage)

    def leave(self) -> None:
        """Goes back to the stage before."""
        if threading.get_ident() == self._thread:
            self._charge()
            self._stack.pop()

    def _charge(self) -> None:
        now_ns = time.thread_time_ns()
        self.spent_ns[self._stack[-1]] += now_ns - self._switched_ns
        self._switched_ns = now_ns

    def time_function(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of a stage."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def step_through(*args: Any, **kwargs: Any) -> Any:
                self.calls[stage] += 1
                return await _Steps(self, stage, function(*args, **kwargs))

            return step_through

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[stage] += 1
            self.enter(stage)
            started_ns = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                if threading.get_ident() != self._thread:
                    self.spent_ns[stage + OTHER_THREADS] += time.thread_time_ns() - started_ns
                self.leave()

        return call

    def as_json(self) -> dict[str, Any]:
        """Returns the split, in microseconds per request."""
        self._charge()
        num_requests = self.calls[REQUESTS]
        stages = {stage: spent_ns / 1000 / max(1, num_requests) for stage, spent_ns in self.spent_ns.items()}
        return {"requests": num_requests, "us_per_request": stages}


class _Steps:
    """A coroutine of which each step counts for a stage."""

    def __init__(self, clock: StageClock, stage: str, coroutine: Awaitable[Any]) -> None:
        self._clock = clock
        self._stage = stage
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._coroutine.__await__()
        step, value = steps.send, None
        while True:
            self._clock.enter(self._stage)
            try:
                waited_for = step(value)
            except StopIteration as end:
                return end.value
            finally:
                self._clock.leave()
            step, value = steps.send, None
            try:
                value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - passed on to the coroutine
                step, value = steps.throw, error


def install(clock: StageClock) -> None:
    """Replaces the functions of all stages; those that a checkout does not have are left out."""
    for stage, functions in STAGES.items():
        for path in functions:
            module_name, _, name = path.partition(":")
            owner_name, _, attribute = name.rpartition(".")
            owner: Any = importlib.import_module(module_name)
            owner = getattr(owner, owner_name, None) if owner_name else owner
            function = getattr(owner, attribute, None)
            if function is not None:
                setattr(owner, attribute, clock.time_function(stage, function))


def main() -> int:
    """Runs the router; writes the split at its end."""
    flag, path, *arguments = sys.argv[1:]
    if flag != "--split":
        print("traced_router: --split OUT.json comes first", file=sys.stderr)
        return 2
    from sluice_router import __main__ as router  # noqa: PLC0415 - only the router's process needs it

    clock = StageClock()
    install(clock)
    sys.argv[1:] = arguments
    try:
        return router.main()
    finally:
        Path(path).write_text(json.dumps(clock.as_json()), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
