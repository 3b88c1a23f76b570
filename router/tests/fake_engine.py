"""A scripted engine: the engine stream's rules without a model, as a synchronous core and as a real gRPC server.

The n-th output token of a prompt is a function of both, so a test can tell a lost, doubled or foreign token whatever
engines a request went through. A running request gets one token per ``step``, from the step after its submit on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import harness_faults

from sluice.v1 import engine_pb2, engine_pb2_grpc, plan_pb2, sampling_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

# How long it keeps requests that clients may resume.
RESUME_S = 30.0
BLOCK_SIZE = 16


def expected_token(prompt: Sequence[int], index: int) -> int:
    """Compute the token that every engine gives for a prompt at an output index."""
    return (sum(prompt) * 7 + len(prompt) + index * 13) % 251


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return [expected_token(prompt, index) for index in range(num_tokens)]


@dataclass
class FakeRequest:
    submit: engine_pb2.Submit
    num_output: int
    num_steps: int = 0
    is_handing_off: bool = False
    hand_off_at: int = 0  # output tokens with which it ends, if there are fewer
    num_computed: int = 0  # of the first part of a prompt

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.submit.prompt_token_ids) + self.num_output + 1) // BLOCK_SIZE)


@dataclass
class FakeCore:
    """One engine behind one stream, without I/O: ``take`` commands in, messages out of ``outbox`` and ``step``."""

    engine_id: str
    epoch: int = 1
    fingerprint: str = "fp"
    model: str = ""
    model_id: str = ""
    kv_blocks_total: int = 1000
    max_num_seqs: int = 64
    max_batch_tokens: int = 8192
    max_model_len_tokens: int = 4096
    refuse_grants: str = ""
    refuse_hand_offs: str = ""
    prefix_root: bytes = b""
    num_cached_tokens: int = 0
    acknowledges: bool = True
    hands_off_prefills: bool = False
    logprobs: bool = False
    pulls_parts: bool = False
    cuts_prompts: bool = False
    first_part_steps: int = 1
    tells_of_brought: bool = True
    refuse_offers: str = ""
    refuse_parts: str = ""
    offers: set[int] = field(default_factory=set)
    copied: dict[int, list[int]] = field(default_factory=dict)
    parts_under_way: list[engine_pb2.PartPulled] = field(default_factory=list)
    running: dict[int, FakeRequest] = field(default_factory=dict)
    pinned: dict[int, FakeRequest] = field(default_factory=dict)
    grants: dict[int, int] = field(default_factory=dict)
    held: list[engine_pb2.HeldRequest] = field(default_factory=list)
    kept: dict[str, FakeRequest] = field(default_factory=dict)
    configured: engine_pb2.Configured = field(default_factory=engine_pb2.Configured)
    strategy: str = ""
    chunk_sizes_tokens: tuple[int, ...] = ()
    outbox: list[engine_pb2.AttachResponse] = field(default_factory=list)
    num_iterations: int = 0
    last_submit_number: int = 0
    is_draining: bool = False
    iteration_age_s: float = 0.0
    commands: list[engine_pb2.AttachRequest] = field(default_factory=list)
    submitted: list[engine_pb2.Submit] = field(default_factory=list)
    resumed: list[engine_pb2.Resume] = field(default_factory=list)
    aborted_held: list[str] = field(default_factory=list)
    ended: dict[bytes, tuple[FakeRequest, engine_pb2.Finished]] = field(default_factory=dict)
    ignores_claims: bool = False
    released_grants: list[int] = field(default_factory=list)

    def hello(self) -> engine_pb2.AttachResponse:
        hello = engine_pb2.EngineHello(
            engine_id=self.engine_id,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            model=self.model,
            model_id=self.model_id,
            max_batch_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len_tokens=self.max_model_len_tokens,
            block_size_tokens=BLOCK_SIZE,
            kv_bytes_per_token=1024,
            prefix_root=self.prefix_root,
            pulls_parts=self.pulls_parts,
            cuts_prompts=self.cuts_prompts,
            resume_timeout_s=RESUME_S,
            held=[*self.held, *(self._describe_held(request) for request in self.kept.values())],
        )
        return engine_pb2.AttachResponse(hello=hello, load=self.load())

    def _take_moves(self, message: engine_pb2.AttachRequest, answer: engine_pb2.AttachResponse) -> None:
        for grant_request in message.grant_requests:
            answer.grants.append(self._grant(grant_request))
        for asked in message.kv_offer_requests:
            self._offer(asked, answer)
        for part in message.part_pulls:
            self._pull(part)
        for offer_id in message.released_offer_ids:
            self.offers.remove(offer_id)
        for hand_off in message.hand_offs:
            self._hand_off(hand_off, answer)
        for slot in message.released_slots:
            self.pinned.pop(slot)
        for grant_id in message.released_grant_ids:
            self.released_grants.append(grant_id)
            self.grants.pop(grant_id, None)

    def _offer(self, asked: engine_pb2.KvOfferRequest, answer: engine_pb2.AttachResponse) -> None:
        request = self.running.get(asked.slot)
        reason = self.refuse_offers or ("unknown" if request is None else "")
        offer = answer.kv_offers.add(offer_id=asked.offer_id, reason=reason)
        if request is None or reason:
            return
        assert request.submit.fence == asked.fence
        num_tokens = len(request.submit.prompt_token_ids) + request.num_output - 1
        if request.submit.split_prompt_tokens:
            num_tokens = request.num_computed
        offer.kv.engine_id, offer.kv.fingerprint = self.engine_id, self.fingerprint
        offer.kv.num_tokens = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if offer.kv.num_tokens <= asked.first_token:
            offer.ClearField("kv")
            offer.reason = "none"
            return
        self.offers.add(asked.offer_id)

    def _pull(self, part: engine_pb2.PartPull) -> None:
        """Its read ends with the next iteration."""
        reason = self.refuse_parts or ("" if part.grant_id in self.grants else "lapsed")
        tokens = self.copied.setdefault(part.grant_id, [])
        tokens += part.token_ids
        assert len(tokens) == part.kv.num_tokens, "tokens that do not reach to the end of the part"
        self.parts_under_way.append(
            engine_pb2.PartPulled(grant_id=part.grant_id, num_tokens=0 if reason else part.kv.num_tokens, reason=reason)
        )

    @staticmethod
    def _describe_held(request: FakeRequest) -> engine_pb2.HeldRequest:
        return engine_pb2.HeldRequest(
            request_id=request.submit.request_id, fence=request.submit.fence, num_output_tokens=request.num_output
        )

    def hold(self) -> None:
        """The stream is lost: what runs goes on, unless it was told to hand off."""
        for request in self.running.values():
            if not request.is_handing_off:
                self.kept[request.submit.request_id] = request
            elif request.submit.resume_key:
                end = engine_pb2.Finished(reason=sampling_pb2.FINISH_REASON_HANDED_OFF)
                self.ended[request.submit.resume_key] = request, end
        self.running.clear()
        self.pinned.clear()
        self.grants.clear()
        self.last_submit_number = 0

    def load(self) -> engine_pb2.LoadReport:
        waiting = [request for request in self.running.values() if request.num_steps == 0]
        return engine_pb2.LoadReport(
            last_submit_number=self.last_submit_number,
            queued_prefill_tokens=sum(len(request.submit.prompt_token_ids) for request in waiting),
            queued_requests=len(waiting),
            running_decodes=len(self.running) - len(waiting),
            kv_blocks_total=self.kv_blocks_total,
            kv_blocks_used=self.num_used_blocks,
            kv_blocks_granted=sum(self.grants.values()),
            kv_blocks_pinned=sum(request.num_blocks for request in self.pinned.values()),
            chunk_size_tokens=self.configured.chunk_size_tokens,
            is_draining=self.is_draining,
            iteration_age_s=self.iteration_age_s,
            transport="fake",
        )

    @property
    def num_used_blocks(self) -> int:
        return sum(request.num_blocks for request in (*self.running.values(), *self.pinned.values()))

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.pinned or self.grants or self.kept or self.offers or self.parts_under_way)

    @harness_faults.recorded()
    def take(self, message: engine_pb2.AttachRequest) -> None:
        """Carries out a batch in the order of its fields, as the engine does."""
        self.commands.append(message)
        answer = engine_pb2.AttachResponse()
        for resume in message.resumes:
            self._resume(resume, answer)
        if not self.ignores_claims:
            answer.claim_answers.extend(self._claim(claim.resume_key) for claim in message.claims)
        for submit in message.submits:
            self._submit(submit)
        for abort in message.aborts:
            if abort.held_request_id:
                self.aborted_held.append(abort.held_request_id)
                self.kept.pop(abort.held_request_id, None)
            elif (request := self.running.pop(abort.slot, None)) is not None:
                self._add_finished(answer, request, sampling_pb2.FINISH_REASON_ABORTED)
        self._take_moves(message, answer)
        if message.HasField("configure"):
            self._configure(message.configure, answer)
        answer.load.CopyFrom(self.load())
        self.outbox.append(answer)

    def _resume(self, resume: engine_pb2.Resume, answer: engine_pb2.AttachResponse) -> None:
        request = self.kept.pop(resume.request_id, None)
        if request is None or request.submit.fence != resume.fence:
            answer.finished.add(slot=resume.slot, reason=sampling_pb2.FINISH_REASON_ABORTED)
            return
        self.resumed.append(resume)
        request.submit.slot = resume.slot
        for index in range(resume.next_output_index, request.num_output):
            self._add_token(request, answer, index)
        if request.num_output >= request.submit.sampling.max_tokens:
            self._add_finished(answer, request, sampling_pb2.FINISH_REASON_LENGTH)
        else:
            self.running[resume.slot] = request

    def _claim(self, key: bytes) -> engine_pb2.ClaimAnswer:
        answer = engine_pb2.ClaimAnswer(resume_key=key)
        held = next((item for item in self.kept.values() if item.submit.resume_key == key), None)
        request, end = (held, None) if held is not None else self.ended.get(key, (None, None))
        if request is None:
            return answer
        answer.submit.CopyFrom(request.submit)
        answer.num_tokens_before = len(request.submit.output_token_ids)
        del answer.submit.output_token_ids[:]
        answer.submit.output_token_ids.extend(expected_output(request.submit.prompt_token_ids, request.num_output))
        answer.elapsed_s = 0.5
        if end is not None:
            answer.ended.CopyFrom(end)
        return answer

    def _submit(self, submit: engine_pb2.Submit) -> None:
        assert submit.slot not in self.running, f"{self.engine_id}: slot {submit.slot} is in use"
        assert submit.slot not in self.pinned, f"{self.engine_id}: slot {submit.slot} is pinned"
        assert submit.submit_number == self.last_submit_number + 1
        output = list(submit.output_token_ids)
        assert output == expected_output(submit.prompt_token_ids, len(output)), "foreign output tokens"
        if submit.grant_id:
            self.grants.pop(submit.grant_id, None)
        assert self.cuts_prompts or not submit.split_prompt_tokens
        num_brought = submit.kv.num_tokens
        if num_brought and not output and self.tells_of_brought:
            assert self.cuts_prompts
            self.parts_under_way.append(engine_pb2.PartPulled(grant_id=submit.grant_id, num_tokens=num_brought))
        self.last_submit_number = submit.submit_number
        self.running[submit.slot] = FakeRequest(submit, len(output))
        self.submitted.append(submit)

    def _grant(self, request: engine_pb2.GrantRequest) -> engine_pb2.Grant:
        blocks = -(-request.num_tokens // BLOCK_SIZE)
        free = self.kv_blocks_total - self.num_used_blocks - sum(self.grants.values())
        reason = self.refuse_grants or ("" if blocks <= free else "kv")
        if not reason:
            self.grants[request.grant_id] = blocks
        return engine_pb2.Grant(grant_id=request.grant_id, is_granted=not reason, reason=reason, ttl_s=2.0)

    def _hand_off(self, hand_off: engine_pb2.HandOff, answer: engine_pb2.AttachResponse) -> None:
        request = self.running.get(hand_off.slot)
        reason = self.refuse_hand_offs
        if request is None:
            reason = "unknown"
        elif request.submit.fence != hand_off.fence:
            reason = "fence"
        elif request.num_steps == 0:
            reason = "prefill"
        if reason:
            answer.hand_offs_refused.add(slot=hand_off.slot, reason=reason)
        elif request is not None:
            request.is_handing_off = True
            request.hand_off_at = hand_off.num_output_tokens

    def _configure(self, configure: engine_pb2.Configure, answer: engine_pb2.AttachResponse) -> None:
        if not self.acknowledges:
            return
        if configure.chunk_size_tokens > self.max_batch_tokens:
            answer.configured.generation = configure.generation
            answer.configured.error = f"chunk size {configure.chunk_size_tokens} is not in 0..{self.max_batch_tokens}"
            return
        if configure.generation >= self.configured.generation:
            self.is_draining = configure.is_draining
            self.strategy = configure.strategy
            self.chunk_sizes_tokens = tuple(configure.chunk_sizes_tokens)
            self.configured = engine_pb2.Configured(
                cluster_uid=configure.cluster_uid,
                generation=configure.generation,
                role=configure.role,
                chunk_size_tokens=configure.chunk_size_tokens,
            )
        answer.configured.CopyFrom(self.configured)

    def _add_finished(self, answer, request: FakeRequest, reason: int, **fields: object) -> None:
        num_cached_tokens = 0 if request.submit.HasField("kv") else self.num_cached_tokens
        answer.finished.add(
            slot=request.submit.slot,
            reason=reason,
            num_output_tokens=request.num_output,
            num_cached_tokens=num_cached_tokens,
            **fields,
        )
        if request.submit.resume_key:
            self.ended[request.submit.resume_key] = request, answer.finished[-1]

    def propose(self, cause: int, slots: Sequence[int] | None = None) -> engine_pb2.AttachResponse:
        """Proposes to move what runs."""
        message = engine_pb2.AttachResponse(load=self.load())
        for slot in self.running if slots is None else slots:
            request = self.running[slot]
            if request.num_steps:
                message.proposals.add(
                    slot=slot, cause=cause, num_output_tokens=request.num_output, num_blocks=request.num_blocks
                )
        return message

    def return_unstarted(self) -> engine_pb2.AttachResponse:
        message = engine_pb2.AttachResponse()
        for slot, request in list(self.running.items()):
            if request.num_steps == 0 and not request.submit.is_recovery:
                del self.running[slot]
                self._add_finished(message, request, sampling_pb2.FINISH_REASON_RETURNED)
        message.load.CopyFrom(self.load())
        return message

    @harness_faults.recorded()
    def step(self) -> engine_pb2.AttachResponse:
        """Runs one iteration."""
        message = engine_pb2.AttachResponse()
        self.num_iterations += 1
        message.parts_pulled.extend(self.parts_under_way)
        self.parts_under_way.clear()
        prefill_tokens = 0
        num_decodes = 0
        for slot, request in list(self.running.items()):
            if request.is_handing_off and request.num_output >= request.hand_off_at:
                self._end_part(slot, request, message)
                continue
            if request.submit.split_prompt_tokens:
                prefill_tokens += self._step_first_part(slot, request, message)
                continue
            if request.num_steps == 0:
                prefill_tokens += len(request.submit.prompt_token_ids)
            else:
                num_decodes += 1
            request.num_steps += 1
            self._add_token(request, message, request.num_output)
            request.num_output += 1
            if request.num_output >= request.submit.sampling.max_tokens:
                del self.running[slot]
                self._add_finished(message, request, sampling_pb2.FINISH_REASON_LENGTH)
            elif self.hands_off_prefills and request.num_output == 1:
                self._end_part(slot, request, message)
        for request in self.kept.values():
            request.num_steps += 1
            request.num_output = min(request.num_output + 1, request.submit.sampling.max_tokens)
        message.load.CopyFrom(self.load())
        if prefill_tokens or num_decodes:
            message.load.iteration.CopyFrom(
                engine_pb2.Iteration(
                    number=self.num_iterations,
                    prefill_tokens=prefill_tokens,
                    attention_work=prefill_tokens**2 / 2,
                    num_chunks=1 if prefill_tokens else 0,
                    num_decodes=num_decodes,
                    duration_s=0.01,
                )
            )
        return message

    def _step_first_part(self, slot: int, request: FakeRequest, message: engine_pb2.AttachResponse) -> int:
        """Computes some of the first part of a prompt; proposes it when it begins."""
        end = request.submit.split_prompt_tokens
        num_tokens = min(-(-end // self.first_part_steps), end - request.num_computed)
        request.num_computed += num_tokens
        request.num_steps += 1
        if request.num_computed == end:
            self._end_part(slot, request, message)
        elif request.num_steps == 1:
            message.proposals.add(slot=slot, cause=engine_pb2.MOVE_CAUSE_SPLIT, num_blocks=request.num_blocks)
        return num_tokens

    def _end_part(self, slot: int, request: FakeRequest, message: engine_pb2.AttachResponse) -> None:
        del self.running[slot]
        self.pinned[slot] = request
        kv = engine_pb2.KvHandle(
            engine_id=self.engine_id,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            num_tokens=request.submit.split_prompt_tokens
            or len(request.submit.prompt_token_ids) + request.num_output - 1,
        )
        self._add_finished(message, request, sampling_pb2.FINISH_REASON_HANDED_OFF, kv=kv)

    def _add_token(self, request: FakeRequest, message: engine_pb2.AttachResponse, index: int) -> None:
        token_id = expected_token(request.submit.prompt_token_ids, index)
        if request.submit.sampling.HasField("num_logprobs"):
            message.logprobs.add(column=len(message.slots), logprob=-float(index), rank=1)
        message.slots.append(request.submit.slot)
        message.token_ids.append(token_id)
        message.output_indexes.append(index)


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """A core behind a real gRPC server; steps by itself every ``step_s``.

    Args:
        core: The core.
        step_s: Pause between two iterations.
        idle_s: Longest silence.
        credentials: Of its server; None: nothing is encrypted.
        interceptors: Of its server.
    """

    def __init__(
        self,
        core: FakeCore,
        *,
        step_s: float = 0.005,
        idle_s: float = 0.2,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.core = core
        self.step_s = step_s
        self.idle_s = idle_s
        self._credentials = credentials
        self._interceptors = interceptors
        self.is_stepping = True
        self.is_silent = False
        self.address = ""
        self.num_streams = 0
        self._server: grpc.aio.Server | None = None
        self._queue: asyncio.Queue[engine_pb2.AttachResponse | None] = asyncio.Queue()

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(interceptors=self._interceptors)
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        address = f"127.0.0.1:{port}"
        if self._credentials is None:
            number = self._server.add_insecure_port(address)
        else:
            number = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        self.address = f"127.0.0.1:{number}"
        return self.address

    async def kill(self) -> None:
        """Ends without a word, as SIGKILL does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def say(self, message: engine_pb2.AttachResponse) -> None:
        """Sends a message outside of the iterations."""
        self._queue.put_nowait(message)

    def end_stream(self) -> None:
        self._queue.put_nowait(None)

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[engine_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(aiter(request_iterator))
        assert first.hello.router_id
        self.num_streams += 1
        self._queue = asyncio.Queue()
        self.core.hold()
        await context.write(self.core.hello())
        tasks = [asyncio.create_task(self._read(request_iterator)), asyncio.create_task(self._run())]
        try:
            while (message := await self._queue.get()) is not None:
                if not self.is_silent:
                    await context.write(message)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, request_iterator: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        async for message in request_iterator:
            self.core.take(message)
            self._flush()

    def _flush(self) -> None:
        for message in self.core.outbox:
            self._queue.put_nowait(message)
        self.core.outbox.clear()

    async def _run(self) -> None:
        idle_s = 0.0
        loop = asyncio.get_running_loop()
        last_step_s = loop.time()
        while True:
            self.core.iteration_age_s = loop.time() - last_step_s
            if (self.core.running or self.core.kept) and self.is_stepping:
                last_step_s, self.core.iteration_age_s = loop.time(), 0.0
                self._queue.put_nowait(self.core.step())
                idle_s = 0.0
            elif idle_s >= self.idle_s:
                self._queue.put_nowait(engine_pb2.AttachResponse(load=self.core.load()))
                idle_s = 0.0
            await asyncio.sleep(self.step_s)
            idle_s += self.step_s


PARAMETERS = {
    "watermark_percent": "95",
    "approaching_factor_percent": "96",
    "early_rejection": "Off",
    "min_tokens_between_moves": "16",
}


def make_plan(roles: dict[str, str], *, generation: int = 1, **changes: object) -> plan_pb2.Plan:
    """Makes a TaiChi plan; ``roles`` says "P" or "D" per engine."""
    fields: dict[str, object] = {
        "cluster_uid": "uid-1",
        "generation": generation,
        "strategy": "taichi",
        "strategy_parameters": PARAMETERS,
        "slo_classes": [plan_pb2.SloClass(name="", ttft_milliseconds=5000, tpot_milliseconds=500)],
        "attainment_percent": 90,
        "engines": [
            plan_pb2.EnginePlan(
                engine_id=name,
                role=plan_pb2.ROLE_PREFILL_HEAVY if role.startswith("P") else plan_pb2.ROLE_DECODE_HEAVY,
                chunk_size_tokens=2048 if role.startswith("P") else 256,
                is_draining=role.endswith("-drain"),
            )
            for name, role in roles.items()
        ],
        "unnamed_chunk_size_tokens": 256,
        "served_model_name": "tiny",
        "num_routers": 1,
    }
    return plan_pb2.Plan(**{**fields, **changes})


def make_rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


@contextlib.asynccontextmanager
async def serving(*engines: FakeEngine) -> AsyncIterator[None]:
    """Starts engines, and ends them with the block."""
    for engine in engines:
        await engine.start()
    try:
        yield
    finally:
        for engine in engines:
            await engine.kill()
