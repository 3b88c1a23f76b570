"""A data plane that generates what a test tells it to, and a model small enough to make on the spot."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_core.records import RequestId
from sluice_router.api import openai_responses
from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.http.response_streams import SseResponseStream
from sluice_router.errors import InvalidRequestError, RouterError, TakenOverError, UnknownStreamError
from sluice_router.scheduling.requests import Finish, FoundRequest, NewRequest, ResponseStream, ServedModel, Usage
from sluice_router.text.output import Output, OutputSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sluice_router.api.slow_readers import SlowReaders
    from sluice_router.scheduling.requests import ClaimTaker
    from sluice_router.text.tokenizer import ModelText

LENGTH = sampling_pb2.FINISH_REASON_LENGTH
STOP = sampling_pb2.FINISH_REASON_STOP
MAX_MODEL_LEN = 512
ANSWER = "hello world, grüße 中文 🎉 the end"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% if extra %}{{ extra }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Live:
    """A request in the fake."""

    request: NewRequest
    response_stream: ResponseStream
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, engine_pb2.TokenLogprobs] = field(default_factory=dict)
    ended: engine_pb2.Finished | None = None


class FakePlane:
    """Keeps the seam's promises; tokens come from ``script`` one per tick, or from the test by hand.

    Args:
        script: Output of a request, or None to leave it to the test.
        tokens_per_tick: How many tokens an engine message brings.
    """

    def __init__(self, script: Callable[[NewRequest], list[int]] | None = None, *, tokens_per_tick: int = 1) -> None:
        self.script = script
        self.tokens_per_tick = tokens_per_tick
        self.live: dict[RequestId, Live] = {}
        self.admitted: list[NewRequest] = []
        self.cancelled: list[tuple[RequestId, str]] = []
        self.refusal: RouterError | None = None
        self.stories: dict[str, dict[str, Any]] = {}
        self.not_ready_reason = ""
        self.is_holding = False
        self.model = ServedModel(name="tiny", max_model_len_tokens=MAX_MODEL_LEN, created_s=1_700_000_000)
        self._numbers = itertools.count(1)
        self.clock_s: float | None = None
        self.changed = asyncio.Event()
        self.output_limits: dict[str, int] = {}
        self.registry = CollectorRegistry()
        # What engines know of resumable requests, which several routers share.
        self.resumable: dict[bytes, tuple[FakePlane, Live]] = {}
        self.detached: list[RequestId] = []
        self.adopted: list[FoundRequest] = []

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_reason

    def find_output_limit(self, owner: str) -> int | None:
        return self.output_limits.get(owner)

    def now(self) -> float:
        return asyncio.get_running_loop().time() if self.clock_s is None else self.clock_s

    def make_request_id(self) -> RequestId:
        return RequestId(f"req-{next(self._numbers)}")

    def admit(self, request: NewRequest, response_stream: ResponseStream) -> None:
        if self.refusal is not None:
            raise self.refusal
        if request.slo_class not in ("", "chat", "batch"):
            raise InvalidRequestError(f"class {request.slo_class!r} is unknown", param="slo_class")
        request_id = request.request_id
        self.admitted.append(request)
        self.live[request_id] = Live(request, response_stream)
        if request.resume_key:
            self.resumable[request.resume_key] = self, self.live[request_id]
        self._note()
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self._tick, request_id, self.script(request))

    def cancel(self, request_id: RequestId, reason: str = "client_gone") -> None:
        if self.live.pop(request_id, None) is not None:
            self.cancelled.append((request_id, reason))
            self._note()

    def claim(self, key: bytes, taker: ClaimTaker) -> None:
        owner, live = self.resumable.get(key, (None, None))
        result = UnknownStreamError("unknown") if live is None else self._describe(live, is_here=owner is self)
        if live is not None and owner is not None and owner is not self:
            owner.fail(live.request.request_id, TakenOverError("elsewhere"))
        asyncio.get_running_loop().call_soon(taker, result)

    def _describe(self, live: Live, *, is_here: bool) -> FoundRequest:
        request = live.request
        submit = engine_pb2.Submit(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            ttft_slo_s=1.0,
            tpot_slo_s=0.1,
            resume_key=request.resume_key,
            resume_state=request.resume_state,
        )
        return FoundRequest(
            submit=submit,
            output_token_ids=array("I", live.token_ids),
            elapsed_s=0.0,
            num_tokens_before=0,
            ended=live.ended,
            live=live if is_here and live.ended is None else None,
            logprobs=live.logprobs,
        )

    def adopt(
        self, found: FoundRequest, request: NewRequest, response_stream: ResponseStream, stop_at: int | None
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.adopted.append(found)
        tokens = list(found.output_token_ids)
        live = Live(request, response_stream, len(tokens), tokens, dict(found.logprobs), found.ended)
        if isinstance(found.live, Live):
            found.live.response_stream.on_error(TakenOverError("another connection"))
        self.live[request.request_id] = live
        self.resumable[request.resume_key] = self, live
        self._note()
        if stop_at is not None or found.ended is not None:
            live.num_tokens = live.num_tokens if stop_at is None else stop_at
            self.finish(request.request_id, STOP if stop_at is not None or found.ended is None else found.ended.reason)

    def detach(self, request_id: RequestId) -> None:
        self.detached.append(request_id)
        self._note()

    def format_metrics(self) -> bytes:
        return generate_latest(self.registry)

    def explain(self, request_id: str) -> dict[str, Any] | None:
        return self.stories.get(request_id)

    def emit(self, request_id: RequestId, token_ids: list[int], *, logprobs: Any = None) -> bool:
        """One engine message; returns whether the request goes on."""
        live = self.live.get(request_id)
        if live is None:
            return False
        if logprobs is None and live.request.sampling.HasField("num_logprobs"):
            logprobs = [make_logprobs(token_id, live.request.sampling.num_logprobs) for token_id in token_ids]
        stop_at = None
        for index, token_id in enumerate(token_ids):
            if logprobs is not None:
                live.logprobs[live.num_tokens] = logprobs[index]
            live.token_ids.append(token_id)
            live.num_tokens += 1
            stop_at = live.response_stream.on_token(token_id, None if logprobs is None else logprobs[index])
            if stop_at is not None:
                break
        live.response_stream.flush(self.now())
        if stop_at is not None:
            live.num_tokens = stop_at
            self.finish(request_id, STOP)
        return stop_at is None

    def finish(self, request_id: RequestId, reason: Any = LENGTH, stop_token_id: int | None = None) -> None:
        live = self.live.pop(request_id, None)
        if live is not None:
            live.ended = engine_pb2.Finished(reason=reason)
            live.response_stream.on_finished(Finish(reason=reason, stop_token_id=stop_token_id, usage=make_usage(live)))
            self._note()

    def fail(self, request_id: RequestId, error: RouterError) -> None:
        live = self.live.pop(request_id, None)
        if live is not None:
            live.response_stream.on_error(error)
            self._note()

    async def wait(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Waits for something that the plane will notice."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _tick(self, request_id: RequestId, rest: list[int]) -> None:
        live = self.live.get(request_id)
        if live is None:
            return
        room = live.request.sampling.max_tokens - live.num_tokens
        now, rest = rest[: min(self.tokens_per_tick, room)], rest[self.tokens_per_tick :]
        if not self.emit(request_id, now):
            return
        if live.num_tokens >= live.request.sampling.max_tokens:
            self.finish(request_id, LENGTH)
        elif now[-1] in live.request.sampling.stop_token_ids or not rest:
            eos = now[-1] if now[-1] in live.request.sampling.stop_token_ids and now[-1] != 2 else None
            self.finish(request_id, STOP, eos)
        else:
            asyncio.get_running_loop().call_soon(self._tick, request_id, rest)

    def _note(self) -> None:
        self.changed.set()


def make_sse_response_stream(
    text: ModelText,
    *,
    slow_readers: SlowReaders,
    cancel: Callable[[], None],
    progress: AnswerProgress | None = None,
    index: int = 0,
) -> SseResponseStream:
    """A stream of ``/v1/completions`` as the HTTP edge makes it."""
    settings = OutputSettings()
    answer = openai_responses.CompletionFormat(
        answer_id="cmpl-1",
        index=index,
        created_s=1,
        model="tiny",
        settings=settings,
        text=text,
        includes_usage=False,
        prompt_token_ids=None,
    )
    return SseResponseStream(
        Output(text, settings),
        answer,
        progress or AnswerProgress(1, 1),
        index,
        slow_readers=slow_readers,
        interval_tokens=1,
        cancel=cancel,
    )


def make_usage(live: Live) -> Usage:
    return Usage(
        prompt_tokens=len(live.request.prompt_token_ids),
        output_tokens=live.num_tokens,
        cached_tokens=3,
        ttft_s=0.0125,
        tpot_s=None if live.num_tokens < 2 else 0.005,
        num_hand_offs=1,
        num_recoveries=2,
        is_slo_met=True,
    )


def make_logprobs(token_id: int, num_top: int) -> engine_pb2.TokenLogprobs:
    """The sampled token is the most likely one; the others follow it by id."""
    others = [token_id + index for index in range(num_top)]
    return engine_pb2.TokenLogprobs(
        logprob=-0.5, rank=1, top_token_ids=others, top_logprobs=[-0.5 - index for index in range(num_top)]
    )


def write_model(directory: Path) -> None:
    """Makes the text side of a model: byte-level BPE trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog; hello world, hello there"] * 20, trainer
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {"vocab_size": 400, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": 2},
        "generation_config.json": {"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 20},
        "tokenizer_config.json": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))


def say(text: ModelText, answer: str, *, ends: bool = True) -> Callable[[NewRequest], list[int]]:
    """A script that answers ``answer`` and EOS."""
    ids = text.encode_now(answer, add_special_tokens=False)
    return lambda request: [*ids, 2] if ends else ids


async def read_until(reader: asyncio.StreamReader, mark: bytes, timeout_s: float = 60) -> bytes:
    async with asyncio.timeout(timeout_s):
        return await reader.readuntil(mark)


@contextlib.asynccontextmanager
async def connect(port: int | None, **arguments: Any):
    host = None if port is None else "127.0.0.1"
    reader, writer = await asyncio.open_connection(host, port, **arguments)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request_bytes(
    path: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None, version: str = "1.1"
) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data
