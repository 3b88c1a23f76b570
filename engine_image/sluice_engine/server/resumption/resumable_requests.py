"""Requests that clients may go on with at another router, by the keys that only their routers know.

A request is here from its submit until its time is up: while it runs, with a router or without, and for
``resume_timeout_s`` after its end here. Its router may have died before the client got the last tokens, or between a
hand-off and the next submit. Memory of what has ended is bounded; the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from sluice.v1 import engine_pb2 as wire
from sluice.v1 import sampling_pb2
from sluice_engine.server.router_session import RouterRequest

if TYPE_CHECKING:
    from sluice_engine.server.counters import ServerCounters
    from sluice_engine.server.router_session import RouterSession

# A router's state of an answer is a few hundred bytes, and longer with long stop strings.
MAX_STATE_BYTES = 16 << 10
MAX_ENDED_BYTES = 64 << 20
# Of a request that has ended, beside its tokens and its router's state; an estimate.
RECORD_BYTES = 1024
TOKEN_BYTES = 4
# Claims of keys that nobody knows cost a caller little, so their number is bounded.
MAX_CLAIMS = 16_384


class ResumableRequests:
    """Finds requests by their keys.

    Args:
        counters: What is counted for metrics.
        max_ended_bytes: Memory of requests that have ended; an estimate.
    """

    def __init__(self, counters: ServerCounters, max_ended_bytes: int = MAX_ENDED_BYTES) -> None:
        self._counters = counters
        self._max_ended_bytes = max_ended_bytes
        self._by_key: dict[bytes, RouterRequest] = {}
        # When each ended, in order of their ends, and what it takes.
        self._ended: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._num_ended_bytes = 0
        # Who claimed a key last, and when; in order of the claims.
        self._claims: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    @property
    def num_ended(self) -> int:
        """Requests that have ended and are kept."""
        return len(self._ended)

    def refuses(self, submit: wire.Submit, router_id: str) -> bool:
        """Whether another router has claimed the request: a submit that was under way comes too late."""
        return bool(submit.resume_key) and self._claims.get(submit.resume_key, (router_id, 0.0))[0] != router_id

    def enter(self, request: RouterRequest, submit: wire.Submit, now_s: float) -> None:
        """Notes a request whose submit was accepted, if its client can resume it."""
        if not submit.resume_key or len(submit.resume_state) > MAX_STATE_BYTES:
            return
        self._drop_end(submit.resume_key)
        request.submit, request.submitted_s = submit, now_s
        self._by_key[submit.resume_key] = request

    def keep_refused(self, session: RouterSession, submit: wire.Submit, now_s: float) -> None:
        """Keeps what a refused submit brought: its router may have had more of the request than any engine."""
        known = self._by_key.get(submit.resume_key)
        if known is not None and (known.ended is None or known.fence >= submit.fence):
            return
        num_tokens = len(submit.output_token_ids)
        request = RouterRequest(session, "", submit.request_id, submit.fence, None, num_tokens)
        finished = wire.Finished(reason=sampling_pb2.FINISH_REASON_CLAIMED, num_output_tokens=num_tokens)
        self.enter(request, submit, now_s)
        self.keep_end(request, finished, now_s)

    def keep_end(self, request: RouterRequest, finished: wire.Finished, now_s: float) -> None:
        """Keeps what a request had when it ended here."""
        submit = request.submit
        if submit is None or self._by_key.get(submit.resume_key) is not request:
            return
        request.ended = finished
        num_tokens = len(submit.prompt_token_ids) + request.num_output_tokens
        num_bytes = RECORD_BYTES + len(submit.resume_state) + TOKEN_BYTES * num_tokens
        self._ended[submit.resume_key] = now_s, num_bytes
        self._num_ended_bytes += num_bytes
        while self._num_ended_bytes > self._max_ended_bytes:
            self._forget_oldest_end()
            self._counters.num_evicted_ends += 1

    def forget(self, request: RouterRequest) -> None:
        """Forgets a request that was given up."""
        if request.submit is not None and self._by_key.get(request.submit.resume_key) is request:
            self._drop_end(request.submit.resume_key)
            del self._by_key[request.submit.resume_key]

    def claim(self, session: RouterSession, key: bytes, now_s: float) -> wire.ClaimAnswer:
        """Lets a router go on with a request; one that runs is held for it from here on."""
        self._claims.pop(key, None)
        self._claims[key] = session.router_id, now_s
        if len(self._claims) > MAX_CLAIMS:
            self._claims.popitem(last=False)
        request = self._by_key.get(key)
        if request is None or request.submit is None:
            return wire.ClaimAnswer(resume_key=key)
        self._counters.num_claimed += 1
        answer = wire.ClaimAnswer(
            resume_key=key,
            submit=request.submit,
            elapsed_s=max(0.0, now_s - request.submitted_s),
            num_tokens_before=request.first_index,
            logprobs=request.logprobs,
        )
        answer.submit.output_token_ids.extend(request.token_ids)
        if request.ended is not None:
            answer.ended.CopyFrom(request.ended)
            if request.slot is None:  # else its slot may be another request's by now
                request.session.drop(request)
        else:
            request.session.let_go(request)
            session.hold(request, now_s)
        return answer

    def sweep(self, until_s: float) -> None:
        """Forgets what ended or was claimed then or before."""
        while self._ended and next(iter(self._ended.values()))[0] <= until_s:
            self._forget_oldest_end()
        while self._claims and next(iter(self._claims.values()))[1] <= until_s:
            self._claims.popitem(last=False)

    def _forget_oldest_end(self) -> None:
        key, (_, num_bytes) = self._ended.popitem(last=False)
        self._num_ended_bytes -= num_bytes
        del self._by_key[key]

    def _drop_end(self, key: bytes) -> None:
        end = self._ended.pop(key, None)
        if end is not None:
            self._num_ended_bytes -= end[1]
