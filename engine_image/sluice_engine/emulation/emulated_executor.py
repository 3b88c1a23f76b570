"""An emulated GPU: vLLM's real scheduler and KV manager, with a clock in place of the forward pass.

An iteration ends at the later of now and the end of the one before, plus its modelled time. With asynchronous
scheduling the next one is scheduled meanwhile, as on a GPU. Tokens are those of ``emulated_tokens``; they have no
logprobs.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from sluice_core.latency import compute_attention_work
from sluice_core.latency.measured_profiles import DEFAULT_ASSUMPTIONS
from sluice_core.records import IterationShape
from sluice_engine.core_encoding import decode_extras
from sluice_engine.emulation.emulated_gpu_profile import find_gpu, read_settings
from sluice_engine.emulation.emulated_kv_transfer import EmulatedTransfers, KvPort
from sluice_engine.emulation.emulated_tokens import choose_token, hash_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

# Bytes of KV cache when neither the profile nor the settings say.
DEFAULT_KV_BYTES = 1 << 30
# Host's part of a modelled iteration, in seconds. An iteration scheduled no later than that after the one before began
# when that one ended: the engine's own CPU time is part of the modelled time, and not added to it.
HOST_S = DEFAULT_ASSUMPTIONS.host_iteration_s


class ClockFuture(Future[ModelRunnerOutput]):
    """An iteration's output; its reader waits until the iteration's end.

    Args:
        end_s: End of the iteration (``time.perf_counter``).
        output: Its output.
    """

    def __init__(self, end_s: float, output: ModelRunnerOutput) -> None:
        super().__init__()
        self._end_s = end_s
        self._output = output

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:  # noqa: ARG002 - concurrent.futures' signature
        """Sleeps until the end; the engine's loop itself waits, no thread does."""
        wait_s = self._end_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        return self._output

    def done(self) -> bool:
        """True from the iteration's end on."""
        return time.perf_counter() >= self._end_s


@dataclass(slots=True)
class EmulatedRequest:
    """A request on the emulated GPU; mutable, owned by the executor.

    Args:
        prompt_hash: See ``hash_prompt``.
        num_tokens: Tokens known: prompt and output.
        num_computed_tokens: Tokens whose KV is there.
        is_prefilling: It is in the midst of a prompt, or of recomputing: one token may be the last chunk of it.
    """

    prompt_hash: int
    num_tokens: int
    num_computed_tokens: int
    is_prefilling: bool = False


class EmulatedExecutor(Executor):  # type: ignore[misc]
    """What ``distributed_executor_backend`` names."""

    supports_pp = False

    def _init_executor(self) -> None:
        settings = read_settings(self.vllm_config)
        self._gpu = find_gpu(settings)
        self._settings = settings
        # The CPU platform turns it off while the configuration is made; a GPU's engine has it.
        self.scheduler_config.async_scheduling = True
        self._vocabulary_tokens = self.model_config.get_vocab_size()
        self._eos_token_ids = find_eos_token_ids(self.model_config)
        self._requests: dict[str, EmulatedRequest] = {}
        self._busy_until_s = 0.0
        self._output: Future[ModelRunnerOutput] | None = None
        transfer = self.vllm_config.kv_transfer_config
        port = KvPort((transfer.get_from_extra_config("host", ""), transfer.get_from_extra_config("port", 0)))
        self._transfers = EmulatedTransfers(port, settings.link_bytes_per_s, settings.link_latency_s)
        self._methods: dict[str, Callable[..., Any]] = {
            "get_kv_cache_spec": self._make_kv_cache_spec,
            "get_supported_kv_cache_layouts": lambda: ["LBHNC", "LBNHC"],
            "determine_available_memory": self._count_kv_bytes,
            "compile_or_warm_up_model": lambda: CompilationTimes(0.0, 0.0),
            "get_supported_tasks": lambda: ("generate",),
            "supports_draft_weight_updates": lambda: False,
        }

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """An emulated GPU is scheduled ahead, as a GPU is."""
        return True

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,  # noqa: ARG002 - vLLM's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> Any:
        """Answers for the one worker that there is not; what it does not know does nothing."""
        function = self._methods.get(method) if isinstance(method, str) else None
        answers = [function(*args, **(kwargs or {})) if function else None]
        return _completed(answers) if non_block else answers

    def get_kv_connector_handshake_metadata(self) -> Any:
        """None is needed: a handle says where its source listens."""
        return None

    def check_health(self) -> None:
        """Nothing can fail."""

    def shutdown(self) -> None:
        """Nothing to end: the port's thread is a daemon."""

    def _make_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )
        layers = range(self.model_config.get_num_layers(self.parallel_config))
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in layers}

    def _count_kv_bytes(self) -> int:
        """Bytes of KV cache: explicit ones, the profile's capacity in blocks of the served model, or a default."""
        if explicit := self._settings.kv_bytes or self.cache_config.kv_cache_memory_bytes:
            return int(explicit)
        if not self._gpu.kv_tokens:
            return DEFAULT_KV_BYTES
        block_bytes = sum(spec.page_size_bytes for spec in self._make_kv_cache_spec().values())
        # One block more: vLLM keeps one for itself.
        return int((self._gpu.kv_tokens // self.cache_config.block_size + 1) * block_bytes)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Begins an iteration; ``sample_tokens`` has its output."""
        now_s = time.perf_counter()
        self._update_requests(scheduler_output)
        kv_output = self._advance_transfers(scheduler_output, now_s)
        if not scheduler_output.num_scheduled_tokens:
            output = EMPTY_MODEL_RUNNER_OUTPUT
            if kv_output is not None:
                output = ModelRunnerOutput.with_kv_conn_output_only(kv_output)
            return _completed(output) if non_block else output
        shape, tokens = self._compute(scheduler_output.num_scheduled_tokens)
        request_ids = list(tokens)
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=list(tokens.values()),
            kv_connector_output=kv_output,
        )
        self._output = ClockFuture(self._end_iteration(shape, now_s), output)
        return _completed(None) if non_block else None

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002
        """Output of the iteration that ``execute_model`` began."""
        output, self._output = self._output, None
        assert output is not None
        return output if non_block else output.result()

    def _end_iteration(self, shape: IterationShape, now_s: float) -> float:
        is_late = now_s - self._busy_until_s > HOST_S
        start_s = now_s if is_late else self._busy_until_s
        self._busy_until_s = start_s + self._gpu.profile.estimate_shape_s(shape)
        return self._busy_until_s

    def _update_requests(self, scheduler_output: SchedulerOutput) -> None:
        requests = self._requests
        for request_id in scheduler_output.finished_req_ids:
            requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            num_output = len(decode_extras(new.sampling_params.extra_args).output_token_ids)
            prompt = new.prompt_token_ids
            requests[new.req_id] = EmulatedRequest(
                hash_prompt(prompt), len(prompt) + num_output, new.num_computed_tokens
            )
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, num_computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            requests[request_id].num_computed_tokens = num_computed_tokens
        for request_id, token_ids in cached.all_token_ids.items():
            # Back from a preemption: a token that was in flight then is gone.
            requests[request_id].num_tokens = len(token_ids)
            requests[request_id].is_prefilling = True

    def _compute(self, num_scheduled_tokens: dict[str, int]) -> tuple[IterationShape, dict[str, list[int]]]:
        """What the iteration computes, and the tokens that come of it (none in the middle of a prompt)."""
        tokens: dict[str, list[int]] = {}
        prefill_tokens = num_chunks = num_decodes = decode_context_tokens = 0
        attention_work = 0.0
        for request_id, count in num_scheduled_tokens.items():
            request = self._requests[request_id]
            begin = request.num_computed_tokens
            is_complete = begin + count >= request.num_tokens
            if count == 1 and is_complete and begin and not request.is_prefilling:
                num_decodes += 1
                decode_context_tokens += begin + 1
            else:
                prefill_tokens += count
                num_chunks += 1
                attention_work += compute_attention_work(count, begin)
            request.is_prefilling = not is_complete
            tokens[request_id] = [self._sample(request)] if is_complete else []
        shape = IterationShape(
            prefill_tokens=prefill_tokens,
            attention_work=attention_work,
            num_chunks=num_chunks,
            num_decodes=num_decodes,
            decode_context_tokens=decode_context_tokens,
        )
        return shape, tokens

    def _sample(self, request: EmulatedRequest) -> int:
        position = request.num_tokens
        request.num_tokens = position + 1
        return choose_token(request.prompt_hash, position, self._vocabulary_tokens, self._eos_token_ids)

    def _advance_transfers(self, scheduler_output: SchedulerOutput, now_s: float) -> KVConnectorOutput | None:
        finished = self._transfers.advance(scheduler_output.kv_connector_metadata, now_s)
        if not finished.received and not finished.sent:
            return None
        statistics = None
        if finished.num_bytes:
            data = {"bytes_transferred": finished.num_bytes, "transfer_duration": finished.durations_s}
            statistics = KVConnectorStats(data=data)
        return KVConnectorOutput(
            finished_recving=finished.received or None,
            finished_sending=finished.sent or None,
            failed_recving=finished.failed,
            kv_connector_stats=statistics,
        )


def _completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def find_eos_token_ids(model_config: Any) -> frozenset[int]:
    """All tokens that end an output, by the model's own word."""
    found: set[int] = set()
    for eos in (
        getattr(model_config.hf_text_config, "eos_token_id", None),
        model_config.try_get_generation_config().get("eos_token_id"),
    ):
        if eos is not None:
            found.update([eos] if isinstance(eos, int) else eos)
    return frozenset(found)
