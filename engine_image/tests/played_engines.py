# ruff: noqa: PLC0415  (vLLM takes nine seconds to import)
"""vLLM's real EngineCore and scheduler in this process, on an emulated GPU, with time in hand: nothing runs beside it.

An iteration takes its modelled time at once, and KV ports answer at once, so that a run is the same each time.
"""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from sluice_engine import core_encoding, core_messages
from sluice_engine.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BLOCK = 16
MAX_BATCH_TOKENS, MAX_MODEL_LEN = 256, 400
START_S = 5000.0


@cache
def import_vllm() -> SimpleNamespace:
    """Imports vLLM and what uses it, once; its warnings are its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import sampling_params
        from vllm.v1 import engine
        from vllm.v1.engine import core
        from vllm.v1.executor import abstract

        from sluice_engine.emulation import emulated_executor, emulated_tokens
        from sluice_engine.scheduling import scheduler
        from sluice_engine.startup import vllm_config
    return SimpleNamespace(
        sampling_params=sampling_params,
        engine=engine,
        core=core,
        abstract=abstract,
        emulated_executor=emulated_executor,
        emulated_tokens=emulated_tokens,
        scheduler=scheduler,
        vllm_config=vllm_config,
    )


class HandTime:
    """Seconds on all clocks; sleeping moves them."""

    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @contextmanager
    def in_hand(self) -> Iterator[None]:
        """Puts these seconds in the place of real ones."""
        real = time.monotonic, time.perf_counter, time.sleep, time.time
        time.monotonic = time.perf_counter = time.time = self
        time.sleep = self.pass_time
        try:
            yield
        finally:
            time.monotonic, time.perf_counter, time.sleep, time.time = real


class PlayedPort:
    """A KV port whose datagrams arrive at once."""

    ports: ClassVar[dict[tuple[str, int], PlayedPort]] = {}

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.held: set[str] = set()
        self.read: set[str] = set()
        self.answered: set[str] = set()
        self.is_silent = False
        self.ports[address] = self

    def hold(self, request_id: str) -> None:
        self.held.add(request_id)

    def drop(self, request_id: str) -> None:
        self.held.discard(request_id)

    def take_read(self) -> set[str]:
        done, self.read = self.read, set()
        return done

    def has_answer(self, remote_request_id: str) -> bool:
        is_answered = remote_request_id in self.answered
        self.answered.discard(remote_request_id)
        return is_answered

    def send(self, address: tuple[str, int], verb: str, request_id: str) -> None:
        peer = self.ports.get(tuple(address))
        if peer is None or peer.is_silent:
            return
        if verb == "done":
            peer.read.add(request_id)
        elif request_id in peer.held:
            self.answered.add(request_id)


@dataclass
class PlayedRequest:
    """A request's stay on one engine."""

    request_id: str
    prompt: list[int]
    before: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    handed_off: core_messages.HandedOffKv | None = None
    is_returned: bool = False

    @property
    def is_over(self) -> bool:
        return bool(self.finish_reason) or self.is_returned

    @property
    def output(self) -> list[int]:
        return [*self.before, *self.tokens]


class PlayedEngine:
    """One EngineCore.

    Args:
        name: Its id.
        port: Number of its KV port.
        model: Directory of the model.
        is_ahead: It schedules an iteration while another runs.
        fields: Of the emulated GPU.
    """

    def __init__(self, name: str, port: int, model: Path, *, is_ahead: bool, **fields: Any) -> None:
        vllm = import_vllm()
        emulated_executor, scheduler = vllm.emulated_executor, vllm.scheduler
        self.name, self.told = name, list[str]()
        self.requests: dict[str, PlayedRequest] = {}
        self.refused: list[str] = []
        self.proposals: list[core_messages.ProposedMove] = []
        self.num_iterations = 0
        self._num_requests = 0
        settings = EngineSettings(
            engine_id=name,
            host="127.0.0.1",
            port=1,
            metrics_port=2,
            kv_host="127.0.0.1",
            kv_port=port,
            model=str(model),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_num_seqs=6,
            max_model_len=MAX_MODEL_LEN,
            emulation=fields,
        )
        real = emulated_executor.KvPort, scheduler.die_with_parent
        emulated_executor.KvPort, scheduler.die_with_parent = PlayedPort, lambda: None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = vllm.vllm_config.make_vllm_config(settings, 1)
                self.core = vllm.core.EngineCore(config, vllm.abstract.Executor.get_class(config), log_stats=False)
        finally:
            emulated_executor.KvPort, scheduler.die_with_parent = real
        self._step = self.core.step_fn if is_ahead else self.core.step
        self.port = PlayedPort.ports["127.0.0.1", port]

    def tell(self, line: str) -> None:
        self.told.append(f"{self.name}: {line}")

    def submit(
        self,
        prompt: Sequence[int],
        extras: core_messages.RequestExtras,
        *,
        priority: int = 0,
        max_tokens: int = 20,
        cache_salt: str | None = None,
    ) -> PlayedRequest:
        vllm = import_vllm()
        self._num_requests += 1
        request = PlayedRequest(f"{self.name}-{self._num_requests}", list(prompt), list(extras.output_token_ids))
        parameters = vllm.sampling_params.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        parameters.extra_args = extras.encode()
        self.requests[request.request_id] = request
        record, wave = self.core.preprocess_add_request(
            vllm.engine.EngineCoreRequest(
                request_id=request.request_id,
                prompt_token_ids=list(prompt),
                mm_features=None,
                sampling_params=parameters,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=cache_salt,
                data_parallel_rank=None,
                priority=priority,
            )
        )
        self.core.add_request(record, wave)
        return request

    def command(self, command: core_messages.Command) -> Any:
        (answer,) = core_encoding.decode_answers(
            self.core.scheduler.carry_out(core_encoding.encode_commands([command]))
        )
        self.tell(f"{command} -> {answer}")
        return answer

    def load(self) -> core_messages.SchedulerLoad:
        (load,) = core_encoding.decode_answers(
            self.core.scheduler.carry_out(core_encoding.encode_commands([core_messages.ReadLoadCommand()]))
        )
        return load

    def abort(self, request: PlayedRequest) -> None:
        request.finish_reason = request.finish_reason or "aborted"
        self.core.abort_requests([request.request_id])
        self.tell(f"{request.request_id} is aborted")

    def step(self) -> None:
        """Runs one iteration, if there is anything to do."""
        outputs, _ = self._step()
        for engine_outputs in (outputs or {}).values():
            for output in engine_outputs.outputs:
                self._take(output)

    def _take(self, output: Any) -> None:
        if output.request_id == core_messages.REPORT_ID:
            report = core_encoding.decode_report(output.kv_transfer_params)
            for request_id in report.returned:
                self.requests[request_id].is_returned = True
            self.refused += [item.request_id for item in report.refused]
            self.proposals = report.proposals
            self.num_iterations += report.iteration is not None
            self.tell(f"reports {report}")
            return
        request = self.requests[output.request_id]
        request.tokens += output.new_token_ids
        request.handed_off = core_encoding.decode_hand_off(output.kv_transfer_params)
        if output.finish_reason is not None and not request.finish_reason:
            request.finish_reason = str(output.finish_reason)
        ended = f", {output.finish_reason} {request.handed_off}" if output.finish_reason is not None else ""
        self.tell(f"{output.request_id} +{len(output.new_token_ids)}{ended}")


def expected_output(prompt: Sequence[int], num_tokens: int, engine: PlayedEngine) -> list[int]:
    """The tokens that an emulated GPU gives, wherever it computes them."""
    vllm = import_vllm()
    tokens = vllm.emulated_tokens
    config = engine.core.vllm_config.model_config
    eos = vllm.emulated_executor.find_eos_token_ids(config)
    hashed = tokens.hash_prompt(list(prompt))
    first = len(prompt)
    size = config.get_vocab_size()
    return [tokens.choose_token(hashed, first + index, size, eos) for index in range(num_tokens)]
