# ruff: noqa: PLC0415  (vLLM takes nine seconds to import: only tests that start engines pay them)
"""Real engines for tests, driven by hand through vLLM's synchronous client.

A test process and its fork server import vLLM once (9 s each); every engine is forked from the server (3 s). Nothing
runs beside the test: outputs wait in the client's queue until ``Engine.poll`` takes them.
"""

from __future__ import annotations

import os
import queue
import time
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from core_processes import CoreContext

from sluice_engine import core_encoding, core_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path


BLOCK_SIZE = 32
MAX_BATCH_TOKENS = 512
DEADLINE_S = 20.0
# PyTorch compiles what computes logprobs when it is first asked for some: it takes long where it never did so before.

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    UCX_TLS="tcp,sm,self",
    UCX_NET_DEVICES="lo",
    UCX_TCP_USER_TIMEOUT="4s",
    VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
)


def import_vllm() -> None:
    """Imports all that clients of engines need, once; its warnings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.engine.arg_utils
        import vllm.v1.engine.core_client
        import vllm.v1.worker.cpu_worker  # noqa: F401

        from sluice_engine import (
            plugin,
            vllm_internals_check,  # noqa: F401
        )

        plugin.register()


@dataclass
class Part:
    """A request's stay on one engine."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    handed_off: core_messages.HandedOffKv | None = None
    is_returned: bool = False

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.is_returned


class Engine:
    """One EngineCore process with Sluice's plugin."""

    def __init__(
        self,
        name: str,
        model: Path,
        port: int,
        *,
        is_async: bool = False,
        lease_s: int = 30,
        replaced: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        import vllm.v1.engine.utils
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core_client import SyncMPClient
        from vllm.v1.executor.abstract import Executor

        from sluice_engine import plugin
        from sluice_engine.kv_transfer.transfer_config import make_transfer_config

        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        settings: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_batched_tokens": MAX_BATCH_TOKENS,
            "max_num_seqs": 32,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "block_size": BLOCK_SIZE,
            "scheduling_policy": "priority",
            "scheduler_cls": plugin.ASYNC_SCHEDULER if is_async else plugin.SCHEDULER,
            "distributed_executor_backend": plugin.CPU_EXECUTOR,
            "kv_transfer_config": KVTransferConfig(**make_transfer_config(name, "cpu", 100, lease_s)),
        }
        if is_async:
            from async_executor import AsyncExecutor

            settings["distributed_executor_backend"] = AsyncExecutor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = EngineArgs(**(settings | options)).create_engine_config()
            # vLLM spawns on CPUs; a fork of the server starts in a fraction of the time.
            with mock.patch.object(vllm.v1.engine.utils, "get_mp_context", return_value=CoreContext(replaced or {})):
                self.client = SyncMPClient(config, Executor.get_class(config), log_stats=False)
        self.name = name
        self.parts: dict[str, Part] = {}
        self.reports: list[core_messages.SchedulerReport] = []
        self.refused: list[core_messages.RefusedHandOff] = []
        self.generation = 0
        self._num_requests = 0

    @property
    def pid(self) -> int:
        return int(self.client.resources.engine_manager.processes[0].pid)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        extras: core_messages.RequestExtras | None = None,
        **sampling: Any,
    ) -> Part:
        """Submits a request; greedy and without an end of its own unless ``sampling`` says so."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        from sluice_engine.startup.vllm_config import GRAMMAR_BACKEND

        self._num_requests += 1
        request_id = f"{self.name}-{self._num_requests}"
        parameters = SamplingParams(
            **({"temperature": 0, "max_tokens": 48, "ignore_eos": True, "detokenize": False} | sampling)
        )
        parameters.extra_args = (extras or core_messages.RequestExtras()).encode()
        if parameters.structured_outputs is not None:
            parameters.structured_outputs._backend = GRAMMAR_BACKEND
        self.parts[request_id] = Part(request_id)
        self.client.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                priority=priority,
            )
        )
        return self.parts[request_id]

    def resume(
        self, part: Part, tokens: Sequence[int], prompt: Sequence[int], *, grant_key: str = "", **sampling: Any
    ) -> Part:
        """Goes on with a request that was handed off elsewhere."""
        assert part.handed_off is not None
        extras = core_messages.RequestExtras(
            output_token_ids=list(tokens),
            transfer_params=part.handed_off.transfer_params,
            grant_key=grant_key,
            first_token_s=time.monotonic() - 0.1,
        )
        return self.submit(prompt, extras=extras, **sampling)

    def recover(self, prompt: Sequence[int], tokens: Sequence[int], **sampling: Any) -> Part:
        """Goes on with a request whose KV is lost."""
        extras = core_messages.RequestExtras(
            output_token_ids=list(tokens), is_recovery=True, first_token_s=time.monotonic() - 0.1
        )
        return self.submit(prompt, extras=extras, **sampling)

    def command(self, command: core_messages.Command) -> Any:
        """Sends one command and returns its answer."""
        (answer,) = core_encoding.decode_answers(
            self.client.call_utility(core_messages.UTILITY, core_encoding.encode_commands([command]))
        )
        return answer

    def grant(
        self, key: str, num_tokens: int, *, cause: str = "prefill_done", ttl_s: float = 2.0
    ) -> core_messages.GrantAnswer:
        answer: core_messages.GrantAnswer = self.command(
            core_messages.GrantCommand(key=key, num_tokens=num_tokens, cause=cause, ttl_s=ttl_s)
        )
        return answer

    def load(self) -> core_messages.SchedulerLoad:
        load: core_messages.SchedulerLoad = self.command(core_messages.ReadLoadCommand())
        return load

    def configure(
        self, chunk_size_tokens: int, *, role: str = "D-heavy", strategy: str = "aggregated", **options: Any
    ) -> core_messages.ConfigureAnswer:
        """Puts a plan of the next generation in force."""
        self.generation += 1
        plan: dict[str, Any] = {
            "generation": self.generation,
            "role": role,
            "chunk_size_tokens": chunk_size_tokens,
            "strategy": strategy,
            "chunk_sizes_tokens": [0, chunk_size_tokens],
        }
        answer: core_messages.ConfigureAnswer = self.command(core_messages.ConfigureCommand(**(plan | options)))
        return answer

    def poll(self, timeout_s: float = 0.001) -> None:
        """Takes in what the engine has produced, waiting a little for the first of it."""
        try:
            outputs = self.client.outputs_queue.get(timeout=timeout_s)
            while True:
                assert not isinstance(outputs, Exception), f"engine {self.name} died: {outputs}"
                self._take_in(outputs)
                outputs = self.client.outputs_queue.get_nowait()
        except queue.Empty:
            return

    def _take_in(self, outputs: Any) -> None:
        for output in outputs.outputs:
            if output.request_id == core_messages.REPORT_ID:
                report = core_encoding.decode_report(output.kv_transfer_params)
                self.reports.append(report)
                for request_id in report.returned:
                    self.parts[request_id].is_returned = True
                self.refused += report.refused
                continue
            part = self.parts.get(output.request_id)
            if part is None:  # of a test that failed
                continue
            part.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                part.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
            part.finish_reason = None if output.finish_reason is None else str(output.finish_reason)
            part.stop_reason = output.stop_reason
            part.handed_off = core_encoding.decode_hand_off(output.kv_transfer_params)

    def abort(self, *parts: Part) -> None:
        self.client.abort_requests([part.request_id for part in parts])

    def is_idle(self) -> bool:
        load = self.load()
        return load.kv_blocks_used == 0 and load.kv_blocks_granted == 0

    def close(self) -> None:
        self.client.shutdown()
        # vLLM leaves its context to the garbage collector, which would complain in the midst of another test. The
        # context can go once its reader has closed its sockets.
        self.client.output_queue_thread.join(DEADLINE_S)
        self.client.ctx.destroy(linger=0)


def wait(engines: Iterable[Engine], condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Polls engines until ``condition`` holds."""
    engines = list(engines)
    end_s = time.monotonic() + deadline_s
    while not condition():
        for engine in engines:
            engine.poll()
        assert time.monotonic() < end_s, f"no end after {deadline_s} s"


def move(
    source: Engine, target: Engine, part: Part, tokens: Sequence[int], prompt: Sequence[int], **sampling: Any
) -> Part:
    """Hands a running decode off, with a grant, as a router does.

    Args:
        tokens: Tokens of the request before this part.

    Returns:
        The part that follows, or the same one when the request ended instead of moving.
    """
    key = f"grant-{part.request_id}"
    assert target.grant(key, len(prompt) + len(tokens) + len(part.tokens) + 8).is_granted
    answer = source.command(core_messages.HandOffCommand(request_id=part.request_id))
    # It may have ended by itself in the meantime.
    assert answer.is_accepted or answer.reason == "unknown", answer
    wait([source, target], lambda: part.is_over)
    if part.handed_off is None:
        target.command(core_messages.ReleaseGrantCommand(key=key))
        return part
    return target.resume(part, [*tokens, *part.tokens], prompt, grant_key=key, **sampling)


def make_prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Makes a prompt of ordinary tokens; another one for each length and salt."""
    return [(index * 37 + num_tokens * 11 + salt * 101) % 2000 + 3 for index in range(num_tokens)]


def run_alone(engine: Engine, prompt: Sequence[int], **sampling: Any) -> Part:
    """Runs a request from beginning to end on one engine, and leaves no prefix behind."""
    part = engine.submit(prompt, **sampling)
    wait([engine], lambda: part.is_over)
    engine.client.reset_prefix_cache()
    return part


def run_moving(engines: Sequence[Engine], cuts: Sequence[int], prompt: Sequence[int], **sampling: Any) -> Part:
    """Runs a request that moves to the other engine whenever it has as many tokens as the next cut says."""
    tokens: list[int] = []
    logprobs: list[float] = []
    part = engines[0].submit(prompt, **sampling)
    for hop, cut in enumerate(cuts):
        source, target = engines[hop % 2], engines[(hop + 1) % 2]
        wait(engines, lambda: part.is_over or (part.tokens and len(tokens) + len(part.tokens) >= cut))  # noqa: B023
        if part.is_over:
            break
        following = move(source, target, part, tokens, prompt, **sampling)
        if following is part:
            break
        tokens += part.tokens
        logprobs += part.logprobs
        part = following
    wait(engines, lambda: part.is_over)
    return Part(part.request_id, tokens + part.tokens, logprobs + part.logprobs, part.finish_reason, part.stop_reason)
