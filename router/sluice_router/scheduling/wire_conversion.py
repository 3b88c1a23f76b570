"""Protobuf to core records and back. Durations cross the wire, timestamps never."""

from __future__ import annotations

import math

from sluice.v1 import engine_pb2, plan_pb2, sampling_pb2
from sluice.wire_fields import names_by_value
from sluice_core.records import EngineId, EnginePlan, IterationShape, MoveCause, OwnerLimits, Plan, Role, Slo, SloClass
from sluice_core.scheduling.engine_state import DuePrefills, EngineLoad
from sluice_core.scheduling.engine_table import EngineConfig
from sluice_core.strategies import get_strategy
from sluice_router.scheduling.entities import LiveRequest
from sluice_router.text.prompt_hashes import PrefixScheme

# The core's enums by the wire's: members of one name.
ROLES = {value: Role[name] for value, name in names_by_value(plan_pb2.Role).items()}
CAUSES = {value: MoveCause[name] for value, name in names_by_value(engine_pb2.MoveCause).items()}
ROLE_VALUES = {role: value for value, role in ROLES.items()}
CAUSE_VALUES = {cause: value for value, cause in CAUSES.items()}


def role_from(value: plan_pb2.Role.ValueType) -> Role:
    """Reads a role; an unspecified one serves with the D-heavy setting (plan.proto)."""
    return ROLES.get(value, Role.DECODE_HEAVY)


def spec_from(hello: engine_pb2.EngineHello) -> EngineConfig:
    """Reads what an engine says it is."""
    return EngineConfig(
        block_size_tokens=hello.block_size_tokens,
        kv_bytes_per_token=hello.kv_bytes_per_token,
        max_num_seqs=hello.max_num_seqs,
        max_batch_tokens=hello.max_batch_tokens,
        cuts_prompts=hello.cuts_prompts,
    )


def prefix_scheme_from(hello: engine_pb2.EngineHello) -> PrefixScheme | None:
    """Reads how an engine hashes prompts; None: it reports no prefixes."""
    if not hello.prefix_root or not hello.block_size_tokens:
        return None
    return PrefixScheme(root=hello.prefix_root, block_size_tokens=hello.block_size_tokens)


def shape_from(iteration: engine_pb2.Iteration) -> IterationShape:
    """Reads what an iteration computed."""
    return IterationShape(
        prefill_tokens=iteration.prefill_tokens,
        attention_work=iteration.attention_work,
        num_chunks=iteration.num_chunks,
        num_decodes=iteration.num_decodes,
        decode_context_tokens=iteration.decode_context_tokens,
    )


def load_from(report: engine_pb2.LoadReport, now: float, iteration_remaining_s: float) -> EngineLoad:
    """Reads a load report.

    Args:
        report: The report.
        now: When it came, in seconds.
        iteration_remaining_s: Expected rest of the iteration under way.
    """
    return EngineLoad(
        last_submit_number=report.last_submit_number,
        queued_prefill_tokens=report.queued_prefill_tokens,
        queued_requests=report.queued_requests,
        queued_attention_work=report.queued_attention_work,
        late_prefill_tokens=report.late_prefill_tokens,
        late_requests=report.late_requests,
        late_attention_work=report.late_attention_work,
        due=[
            DuePrefills(
                due_s=now + prefills.due_s,
                allowed_s=prefills.allowed_s,
                requests=prefills.requests,
                tokens=prefills.tokens,
                attention_work=prefills.attention_work,
            )
            for prefills in report.due
        ],
        running_decodes=report.running_decodes,
        decode_context_tokens=report.decode_context_tokens,
        kv_blocks_total=report.kv_blocks_total,
        kv_blocks_used=report.kv_blocks_used,
        kv_blocks_granted=report.kv_blocks_granted,
        kv_blocks_pinned=report.kv_blocks_pinned,
        iteration_remaining_s=iteration_remaining_s,
        pull_bytes_per_s=report.pull_bytes_per_s,
        is_of_others=report.is_of_others,
        prefill_phase_s=report.prefill_phase_s + report.iteration_age_s if report.prefill_phase_s > 0.0 else 0.0,
        saved_tpot_s=report.saved_tpot_s - report.iteration_age_s if report.HasField("saved_tpot_s") else math.inf,
    )


def plan_from(plan: plan_pb2.Plan) -> Plan:
    """Reads a plan that ``plan.apply_plan`` has checked."""
    strategy = get_strategy(plan.strategy)
    return Plan(
        cluster_uid=plan.cluster_uid,
        generation=plan.generation,
        strategy=strategy.name,
        parameters=strategy.read_parameters(plan.strategy_parameters),
        slo_classes=tuple(
            SloClass(
                name=item.name,
                slo=Slo(ttft_s=item.ttft_milliseconds / 1000, tpot_s=item.tpot_milliseconds / 1000),
                priority=item.priority,
            )
            for item in plan.slo_classes
        ),
        attainment=plan.attainment_percent / 100,
        engines={
            EngineId(item.engine_id): EnginePlan(
                role=ROLES[item.role], chunk_size_tokens=item.chunk_size_tokens, is_draining=item.is_draining
            )
            for item in plan.engines
        },
        unnamed_chunk_size_tokens=plan.unnamed_chunk_size_tokens,
        served_model_name=plan.served_model_name,
        model_fingerprint=plan.model_fingerprint,
        num_routers=max(1, plan.num_routers),
        owner_limits={item.owner: _limits_from(item) for item in plan.owner_limits},
        served_models={item.model_id: item.served_name for item in plan.served_models},
        hold_s=float(plan.hold_seconds),
    )


def _limits_from(item: plan_pb2.OwnerLimits) -> OwnerLimits:
    return OwnerLimits(
        requests_per_minute=item.requests_per_minute,
        tokens_per_minute=item.tokens_per_minute,
        concurrent_requests=item.concurrent_requests,
        max_output_tokens=item.max_output_tokens,
        classes=frozenset(item.classes),
        weight=item.weight,
    )


def configure_message(plan: Plan, part: EnginePlan) -> engine_pb2.Configure:
    """Writes an engine's part of a plan.

    Args:
        plan: The plan.
        part: The engine's part.
    """
    return engine_pb2.Configure(
        cluster_uid=plan.cluster_uid,
        generation=plan.generation,
        role=ROLE_VALUES[part.role],
        chunk_size_tokens=part.chunk_size_tokens,
        is_draining=part.is_draining,
        strategy=plan.strategy,
        strategy_parameters=get_strategy(plan.strategy).format_parameters(plan.parameters),
        chunk_sizes_tokens=sorted({item.chunk_size_tokens for item in plan.engines.values() if not item.is_draining}),
    )


def add_submit(
    outgoing: engine_pb2.AttachRequest,
    request: LiveRequest,
    *,
    slot: int,
    submit_number: int,
    now: float,
    kv: engine_pb2.KvHandle | None,
    grant_id: int,
) -> None:
    """Writes a submit of the request as it stands; its fence is the present one.

    Args:
        outgoing: Message to the engine.
        request: What to submit.
        slot: Slot on the stream.
        submit_number: Number of the submit on the stream.
        now: The router's clock, in seconds.
        kv: Where its KV waits; None: prefill there.
        grant_id: Grant that reserves the room; 0: none.
    """
    new, first_token_s = request.new, request.first_token_s
    submit = outgoing.submits.add(
        slot=slot,
        request_id=request.request_id,
        fence=request.fence,
        submit_number=submit_number,
        sampling=new.sampling,
        grant_id=grant_id,
        priority=request.priority,
        ttft_slo_s=request.slo.ttft_s,
        tpot_slo_s=request.slo.tpot_s,
        age_s=now - new.arrival_s,
        output_tokens_since_reset=len(request.output_token_ids) - request.reset_at_tokens,
        is_recovery=kv is None and first_token_s is not None,
        cache_salt=new.cache_salt,
        split_output_tokens=request.split_output_tokens,
        split_prompt_tokens=request.split_prompt_tokens,
    )
    if new.resume_key:
        _add_resumption(submit, request)
    submit.prompt_token_ids.extend(new.prompt_token_ids)
    submit.output_token_ids.extend(request.output_token_ids)
    if kv is not None:
        submit.kv.CopyFrom(kv)
    if first_token_s is not None:
        submit.since_first_token_s = now - first_token_s


def _add_resumption(submit: engine_pb2.Submit, request: LiveRequest) -> None:
    """Writes what another router needs to go on with a request."""
    submit.resume_key, submit.resume_state = request.new.resume_key, request.new.resume_state
    history = engine_pb2.RequestHistory(
        num_hand_offs=request.num_hand_offs,
        num_recoveries=request.num_recoveries,
        num_cached_tokens=request.cached_tokens,
    )
    submit.history.CopyFrom(history)


def is_random(sampling: sampling_pb2.SamplingParams) -> bool:
    """Whether sampling is random, so that a seed decides its draws."""
    return not sampling.HasField("temperature") or sampling.temperature > 0
