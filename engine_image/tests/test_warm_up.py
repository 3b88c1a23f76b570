"""The first iterations of an engine, on a fake EngineCore."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_engine.core_messages import UTILITY
from sluice_engine.errors import StartError
from sluice_engine.startup import warm_up
from sluice_engine.startup.warm_up import SAMPLING, WarmUp


class FakeCore:
    """Ends every request in its first iteration; knows the plugin's utility, or not."""

    def __init__(self, *, has_plugin: bool) -> None:
        self.has_plugin = has_plugin
        self.requests: list[str] = []

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        assert (method, arguments) == (UTILITY, ([],))
        if not self.has_plugin:
            raise Exception("Call to sluice method failed: 'EngineCoreProc' object has no attribute 'sluice'")  # noqa: TRY002 - vLLM's
        return []

    async def add_request_async(self, request: str) -> None:
        self.requests.append(request)

    async def get_output_async(self) -> Any:
        return SimpleNamespace(
            outputs=[SimpleNamespace(request_id=request, finish_reason="length") for request in self.requests]
        )


class Builder:
    """Makes a request out of its name alone."""

    def build(self, core_id: str, _submit: object, _extras: object) -> str:
        return core_id


async def test_runs_every_kind_of_sampling() -> None:
    core = FakeCore(has_plugin=True)

    await WarmUp(core, Builder()).run()  # type: ignore[arg-type]

    assert core.requests == [f"warm-up-{number}" for number in range(len(SAMPLING))]


async def test_refuses_an_engine_core_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_resolver")
    core = FakeCore(has_plugin=False)

    with pytest.raises(StartError, match=r"has not loaded the plugin sluice.*VLLM_PLUGINS \(lora_resolver\)"):
        await WarmUp(core, Builder()).run()  # type: ignore[arg-type]

    assert core.requests == []


async def test_an_engine_core_that_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class SilentCore(FakeCore):
        async def get_output_async(self) -> Any:
            return await asyncio.Event().wait()

    monkeypatch.setattr(warm_up, "TIMEOUT_S", 0.0)
    with pytest.raises(StartError, match="the first requests did not end within 0 s"):
        await WarmUp(SilentCore(has_plugin=True), Builder()).run()  # type: ignore[arg-type]


async def test_waits_for_the_last_request_and_not_for_the_first() -> None:
    class SlowCore(FakeCore):
        async def get_output_async(self) -> Any:
            ends = ["length", None] if self.num_outputs == 0 else [None, "length"]
            self.num_outputs += 1
            pairs = zip(self.requests, ends, strict=True)
            return SimpleNamespace(outputs=[SimpleNamespace(request_id=name, finish_reason=end) for name, end in pairs])

        num_outputs = 0

    core = SlowCore(has_plugin=True)
    await WarmUp(core, Builder()).run()  # type: ignore[arg-type]
    assert core.num_outputs == 2
