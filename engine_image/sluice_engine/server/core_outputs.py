"""Outputs of the EngineCore: tokens, ends of requests and the scheduler's report go into the messages under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sluice.v1 import sampling_pb2
from sluice_engine import core_encoding, core_messages
from sluice_engine.server import wire_conversion

if TYPE_CHECKING:
    from sluice_engine.server.router_session import RouterRequest
    from sluice_engine.server.session_table import SessionTable


def find_report(outputs: Any) -> core_messages.SchedulerReport | None:
    """The scheduler's report among an iteration's outputs; it comes last."""
    for output in reversed(outputs.outputs):
        if output.request_id == core_messages.REPORT_ID:
            return core_encoding.decode_report(output.kv_transfer_params)
    return None


def take_tokens(outputs: Any, sessions: SessionTable, now_s: float) -> list[str]:
    """Adds an iteration's tokens and ended requests.

    Args:
        outputs: vLLM's ``EngineCoreOutputs``.
        sessions: The engine's routers and requests.
        now_s: Time of its receipt.

    Returns:
        Core ids of requests whose KV nobody will read, because their stream was lost before their hand-off.
    """
    unread = []
    for output in outputs.outputs:
        request = sessions.requests.get(output.request_id)
        if request is not None and _take_output(request, output, sessions, now_s):
            unread.append(request.core_id)
    return unread


def _take_output(request: RouterRequest, output: Any, sessions: SessionTable, now_s: float) -> bool:
    """Returns True if the request was handed off to nobody."""
    if output.prefill_stats is not None and not request.brings_kv:
        request.num_cached_tokens = output.prefill_stats.num_local_cached_tokens
    if output.new_token_ids and not request.is_first_part:
        request.session.add_tokens(request, output.new_token_ids, output.new_logprobs)
    if output.finish_reason is None:
        return False
    # First, because a request that was handed off ends with the reason "length" too.
    handed_off = core_encoding.decode_hand_off(output.kv_transfer_params)
    if handed_off is not None:
        is_held = request.slot is None
        sessions.finish(request, sampling_pb2.FINISH_REASON_HANDED_OFF, now_s, handed_off=handed_off)
        return is_held
    reason = wire_conversion.FINISH_REASONS[output.finish_reason]
    stop = output.stop_reason if isinstance(output.stop_reason, int) else None
    error = "the engine could not go on with the request" if reason == sampling_pb2.FINISH_REASON_ERROR else ""
    sessions.finish(request, reason, now_s, stop_token_id=stop, error=error)
    return False


def take_report(report: core_messages.SchedulerReport, sessions: SessionTable, now_s: float) -> None:
    """Adds what the scheduler reports beside the tokens: proposals, returned prompts, hand-offs that were given up."""
    for proposal in report.proposals:
        if request := sessions.requests.get(proposal.request_id):
            request.session.add_proposal(request, proposal)
    for core_id in report.returned:
        if request := sessions.requests.get(core_id):
            sessions.finish(request, sampling_pb2.FINISH_REASON_RETURNED, now_s)
    for refused in report.refused:
        request = sessions.requests.get(refused.request_id)
        if request is not None and request.slot is not None:
            request.session.add_hand_off_refused(request.slot, refused.reason)
    _take_pulled_parts(report.pulled_parts, sessions)
    if report.prefixes is not None:
        sessions.report_prefixes(report.prefixes)
    for number, submit_number in report.last_submit_numbers.items():
        if session := sessions.get_by_stream(number):
            session.report_submits(submit_number)


def _take_pulled_parts(parts: list[core_messages.PulledPart], sessions: SessionTable) -> None:
    for part in parts:
        # Keys begin with the number of the stream that chose them; one that is over waits for no answer.
        session = sessions.get_by_stream(int(part.key.partition(".")[0]))
        if session is not None:
            session.add_part_pulled(part)
