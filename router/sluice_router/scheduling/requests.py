"""What the client APIs and the data plane know of each other; synchronous, on the event loop's thread.

admitted ── waiting ── running ──► finished | failed | cancelled
               ▲ │        │ ▲
          lost └─│────────┘ ├── moved to another engine (the response stream never notices)
                 └──────────┴── resumed, when only the engine's stream had broken
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mypy_extensions import mypyc_attr
from prometheus_client import CollectorRegistry

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import RequestId
from sluice_router.errors import RouterError

ClaimTaker = Callable[["FoundRequest | RouterError"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What a client API hands over.

    Args:
        request_id: The router's id of it, by ``DataPlane.make_request_id``.
        prompt_token_ids: The prompt, ``array("I")``, not empty; recovery needs it, so it is kept compact.
        sampling: Sampling with generation defaults resolved and ``max_tokens`` > 0. The data plane assigns a seed when
            it samples without one; the API need not.
        slo_class: Name of the class; empty for the default one.
        ttft_slo_s: Objective of this request, in seconds; None: the class's.
        tpot_slo_s: Objective of this request, in seconds; None: the class's.
        priority: Higher goes first; None: the class's.
        arrival_s: When the first byte came, on ``DataPlane.now``'s clock: HTTP, template and tokenizing count.
        deadline_s: When the caller gives up, on the same clock; None: never.
        client_request_id: The caller's own id (``x-request-id``), at most 128 characters; empty: none. Never a key.
        owner: Whose API key it came with; empty where none is asked for.
        trace_headers: W3C trace context of the call (``traceparent``, ``tracestate``); None: it has none.
        cache_salt: It shares cached KV only with requests of the same salt; empty: with all that have none.
        resume_key: By which any router finds it again; empty: its client cannot resume it.
        resume_state: What a router needs to go on with the answer, as engines keep it.
    """

    request_id: RequestId
    prompt_token_ids: array[int]
    sampling: sampling_pb2.SamplingParams
    slo_class: str = ""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    priority: int | None = None
    arrival_s: float
    deadline_s: float | None = None
    client_request_id: str = ""
    owner: str = ""
    cache_salt: str = ""
    trace_headers: Mapping[str, str] | None = None
    resume_key: bytes = b""
    resume_state: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRequest:
    """A request that a client wants to go on with.

    Args:
        submit: How it came to the engine that had it last.
        output_token_ids: Its tokens so far, ``array("I")``.
        elapsed_s: Seconds since then.
        num_tokens_before: Output tokens that it came with.
        engine: Where it runs, held for this router, as the data plane knows it; None: nowhere, or here.
        ended: How its part on that engine ended; None: it has not.
        live: The data plane's record of it, where this router has it already.
        logprobs: Of its tokens, by their index, as far as engines still have them.
        is_certain: False where an engine could not be asked, which may have more of it.
    """

    submit: engine_pb2.Submit
    output_token_ids: array[int]
    elapsed_s: float
    num_tokens_before: int
    engine: object | None = None
    ended: engine_pb2.Finished | None = None
    live: object | None = None
    logprobs: Mapping[int, engine_pb2.TokenLogprobs] = field(default_factory=dict)
    is_certain: bool = True


def rewind(found: FoundRequest, num_tokens: int) -> FoundRequest:
    """Lets a request go on at an earlier token, because the logprobs of those behind it are lost.

    Args:
        found: What was found.
        num_tokens: Output tokens that its client has at least: nobody sees that the others are made once more.
    """
    tokens = found.output_token_ids[:num_tokens]
    if found.live is not None:
        return replace(found, output_token_ids=tokens)
    return replace(found, output_token_ids=tokens, ended=engine_pb2.Finished(reason=sampling_pb2.FINISH_REASON_ABORTED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request used and how it was served.

    Args:
        prompt_tokens: Prompt length.
        output_tokens: Output length, up to the stop.
        cached_tokens: Prompt tokens found in a prefix cache.
        ttft_s: Time to first token.
        tpot_s: Time per output token, pauses included; None for one token.
        num_hand_offs: Moves between engines that kept the KV.
        num_recoveries: Times it went on elsewhere after an engine failed.
        is_slo_met: Both objectives met.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float
    tpot_s: float | None
    num_hand_offs: int
    num_recoveries: int
    is_slo_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The good end of a request.

    Args:
        reason: ``FINISH_REASON_STOP`` or ``FINISH_REASON_LENGTH``.
        stop_token_id: The stop token that ended it, if one did (EOS left out).
        usage: Its usage.
    """

    reason: sampling_pb2.FinishReason.ValueType
    stop_token_id: int | None
    usage: Usage


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseStream:
    """One client's answer in the making: detokenizing, stop strings, and the bytes. A base class.

    Order of calls: ``on_token`` any number of times, ``flush`` at most once per engine message that brought tokens,
    then exactly one of ``on_finished`` and ``on_error``. After that, and after ``DataPlane.cancel``, nothing is called.
    ``on_token`` only accumulates; the bytes go out in ``flush``, and the end carries what is left. An exception out of
    any method ends this request alone.
    """

    def on_token(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> int | None:
        """Takes the next token of the output.

        Args:
            token_id: Every token of the output comes exactly once and in order.
            logprobs: Its logprobs when the request asked for them, else None.

        Returns:
            None to go on. If the output has ended by a stop string: the number of output tokens of the whole request,
            up to and including the one that completed it. The data plane then aborts at the engine and calls
            ``on_finished`` with that usage.
        """
        raise NotImplementedError

    def flush(self, now: float) -> None:
        """Writes what ``on_token`` brought, at most once per engine message. Never blocks."""
        raise NotImplementedError

    def on_finished(self, finish: Finish) -> None:
        """Writes what is held back and ends the answer."""
        raise NotImplementedError

    def on_error(self, error: RouterError) -> None:
        """Ends the answer with an error: an HTTP status before the first byte, an error event after it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What clients may know of the model.

    Args:
        name: Name that clients use.
        max_model_len_tokens: Longest prompt + output; the smallest over the engines; 0: no engine yet.
        created_s: Start of this router, Unix time, for ``/v1/models``.
    """

    name: str
    max_model_len_tokens: int
    created_s: int


class DataPlane(Protocol):
    """What the client APIs see of the rest of the router. Synchronous throughout; call on the event loop's thread.

    ``admit`` and ``cancel`` may be called from within a response stream's methods.
    """

    def now(self) -> float:
        """Reads the clock that all times here are on, in seconds."""
        ...

    def make_request_id(self) -> RequestId:
        """Makes the router's id of a request, for ``cancel``, ``explain`` and the answer; refusals carry it too."""
        ...

    def admit(self, request: NewRequest, response_stream: ResponseStream) -> None:
        """Takes a request over; from here on the response stream gets its end, whatever happens.

        Raises:
            InvalidRequestError: Unknown class, prompt + max_tokens over the model's length, ...
            NotAllowedError: The owner of the API key may not use the class or the priority.
            OwnerLimitError: A limit of the owner is reached.
            ShuttingDownError: This router accepts no more.
            QueueFullError: Too many requests wait.
            NoEngineError: No plan is in force yet.
        """
        ...

    def claim(self, key: bytes, taker: ClaimTaker) -> None:
        """Looks for a request that a client wants to go on with, here and at all engines.

        Args:
            key: Its resume key.
            taker: Gets what was found, or the error that says why nothing was; never from within this call.

        Raises:
            QueueFullError: Too many claims wait for answers.
            ShuttingDownError: This router accepts no more.
        """
        ...

    def adopt(
        self, found: FoundRequest, request: NewRequest, response_stream: ResponseStream, stop_at: int | None
    ) -> None:
        """Goes on with a request that was found, as ``admit`` begins one.

        Args:
            found: What ``claim`` found.
            request: As it was admitted first.
            response_stream: Has taken the tokens of ``found``.
            stop_at: What its ``on_token`` returned with the last of them.

        Raises:
            ShuttingDownError: This router accepts no more.
            NoEngineError: It has changed hands since it was found.
        """
        ...

    def detach(self, request_id: RequestId) -> None:
        """Lets a request go on whose client is gone and may come back; it ends when the client does not in time.

        Its response stream is still called, and keeps nothing. An unknown id is no error.
        """
        ...

    def cancel(self, request_id: RequestId, reason: str = "client_gone") -> None:
        """Ends a request because its client is gone (``client_gone``) or reads too slowly (``slow_reader``).

        Aborted at its engine within one iteration; the response stream is not called again. An unknown id is no error.
        """
        ...

    def find_output_limit(self, owner: str) -> int | None:
        """Finds the most output tokens that a request of an API key's owner may ask for; None: no limit."""
        ...

    @property
    def model(self) -> ServedModel:
        """The model served, under the plan's name."""
        ...

    @property
    def is_ready(self) -> bool:
        """True: plan in force, at least one engine connected, not shutting down (``/readyz``)."""
        ...

    @property
    def is_holding(self) -> bool:
        """True: there is to be no engine until a request comes, which is held until one serves."""
        ...

    @property
    def not_ready_reason(self) -> str:
        """Why not, for people; empty when ready."""
        ...

    @property
    def registry(self) -> CollectorRegistry:
        """Where the client APIs register metrics of their own."""
        ...

    def format_metrics(self) -> bytes:
        """Everything for ``/metrics``, in Prometheus' text format."""
        ...

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """Every decision about a request, for ``/debug/requests/{id}``; by the router's id or the client's.

        Returns:
            Plain data for JSON; None when it is unknown or has left the ring.
        """
        ...
