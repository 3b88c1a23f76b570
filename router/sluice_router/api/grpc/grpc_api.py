"""The client API over gRPC: ``sluice.v1.Router``, with health and reflection; checks and errors are HTTP's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.grpc_credentials import make_server_credentials
from sluice.v1 import resume_pb2, router_pb2, router_pb2_grpc
from sluice_core.records import RequestId
from sluice_router.api.choices import PreparedRequest
from sluice_router.api.departed_clients import leave
from sluice_router.api.edge_metrics import EdgeMetrics
from sluice_router.api.error_statuses import error_status_of
from sluice_router.api.grpc import grpc_fields
from sluice_router.api.grpc.grpc_response_stream import GrpcResponseStream
from sluice_router.api.objectives import CAPABILITY_HEADER, RESUMABLE_HEADER, read_objectives
from sluice_router.api.openai_requests import ChatBody, CompletionBody, FieldError, SluiceOptions, check
from sluice_router.api.request_building import Caller
from sluice_router.api.request_ids import check_request_id, choose_shown_id
from sluice_router.api.request_preparation import RequestPreparer, to_router_error
from sluice_router.api.resumption.answer_states import AnswerIdentity, make_resumable, read_state, restore_request
from sluice_router.api.resumption.claimed_answers import claim_answer, prepare_found, replay
from sluice_router.errors import InvalidRequestError, RouterError
from sluice_router.observability.request_traces import read_trace_headers
from sluice_router.scheduling.requests import DataPlane, Finish
from sluice_router.security.access_control import OPEN_ACCESS, ClientAccess, OwnerFinder
from sluice_router.text.output import Output
from sluice_router.text.tokenizer import ModelText

Context = grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse]

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
HEALTH_INTERVAL_S = 0.2


@dataclass(slots=True, kw_only=True)
class _Answer:
    """A call's answer.

    Args:
        request_id: The router's id of the request.
        shown_id: The caller's.
        output: What the data plane fills.
        begin: Hands the request to the data plane.
        capability: What lets the caller go on after a broken call; empty: nothing does.
        can_come_back: Whether the caller has that.
    """

    request_id: RequestId
    shown_id: str
    output: Output
    begin: Callable[[GrpcResponseStream], None]
    capability: str = ""
    can_come_back: bool = False


class RouterService(router_pb2_grpc.RouterServicer):
    """Answers calls.

    Args:
        plane: The data plane.
        text: The model's text side.
        metrics: Counters and limits of slow clients, shared with HTTP.
        keys: Knows who calls by the key or token; None: everybody is served.
    """

    def __init__(
        self, plane: DataPlane, text: ModelText, metrics: EdgeMetrics, keys: OwnerFinder | None = None
    ) -> None:
        self._keys = keys
        self._plane = plane
        self._text = text
        self._metrics = metrics
        self._preparer = RequestPreparer(plane, text, metrics)

    async def Generate(self, request: router_pb2.GenerateRequest | DecodeError, context: Context) -> None:  # type: ignore[override]  # noqa: N802 - gRPC's name
        """Generates; see router.proto."""
        arrival_s, request_id = self._plane.now(), self._plane.make_request_id()
        if isinstance(request, DecodeError):
            await self._abort(context, _describe_garbage(request), request_id)
            return
        shown_id = choose_shown_id(request.request_id, request_id)
        try:
            owner = self._find_owner(context)
            if request.HasField("resume"):
                answer = await self._resume(request, context, owner)
            else:
                prepared = await self._prepare(request, context, arrival_s, request_id, owner)
                answer = self._begin(prepared, shown_id, is_resumable=request.is_resumable)
            await self._run(answer, context)
            self._metrics.count_answer("grpc", "OK", "")
        except FieldError as error:
            await self._abort(context, grpc_fields.rename(to_router_error(error), request), shown_id)
        except RouterError as error:
            await self._abort(context, grpc_fields.rename(error, request), shown_id)
        except asyncio.CancelledError:
            self._metrics.count_answer("grpc", "CANCELLED", "client_gone")
            raise

    async def ListModels(  # noqa: N802 - gRPC's name
        self,
        request: router_pb2.ListModelsRequest | DecodeError,
        context: grpc.aio.ServicerContext[router_pb2.ListModelsRequest, router_pb2.ListModelsResponse],
    ) -> router_pb2.ListModelsResponse:
        """Lists the models; see router.proto."""
        if isinstance(request, DecodeError):
            await self._abort(context, _describe_garbage(request))
        try:
            self._find_owner(context)
        except RouterError as error:
            await self._abort(context, error)
        model = self._plane.model
        length = model.max_model_len_tokens or self._text.defaults.max_model_len_tokens or 0
        models = [router_pb2.Model(name=model.name, max_model_len_tokens=length)] if model.name else []
        return router_pb2.ListModelsResponse(models=models)

    def _find_owner(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Whose key a call carries; empty where none is asked for."""
        if self._keys is None:
            return ""
        given = dict(context.invocation_metadata() or ()).get("authorization")
        return self._keys.find_owner(given if isinstance(given, str) else None)

    async def _prepare(
        self, request: router_pb2.GenerateRequest, context: Context, arrival_s: float, request_id: RequestId, owner: str
    ) -> PreparedRequest:
        options = check(SluiceOptions, grpc_fields.read_options(request))
        metadata = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        if found := {RESUMABLE_HEADER, CAPABILITY_HEADER} & metadata.keys():
            name = min(found)
            raise FieldError(name, f"{name}: over gRPC the request's fields is_resumable and resume say so")
        remaining_s = context.time_remaining()
        caller = Caller(
            arrival_s=arrival_s,
            objectives=read_objectives(metadata, options),
            request_id=request_id,
            client_request_id=check_request_id("request_id", request.request_id),
            deadline_s=None if remaining_s is None else arrival_s + remaining_s,
            owner=owner,
            trace_headers=read_trace_headers(metadata),
        )
        fields = grpc_fields.read_fields(request)
        kind = request.WhichOneof("prompt")
        if kind == "messages":
            fields |= grpc_fields.read_chat(request.messages)
            self._preparer.check_size(fields)
            return (await self._preparer.prepare_chat(check(ChatBody, fields), caller))[0]
        if kind is None:
            raise FieldError("prompt", "prompt is required: text, token_ids or messages", "missing_required_parameter")
        fields["prompt"] = request.text if kind == "text" else list(request.token_ids.values)
        self._preparer.check_size(fields)
        return (await self._preparer.prepare_completion(check(CompletionBody, fields), caller))[0]

    def _begin(self, prepared: PreparedRequest, shown_id: str, *, is_resumable: bool) -> _Answer:
        """Begins an answer; of a resumable one the caller gets the capability with the first part."""
        capability = ""
        if is_resumable:
            identity = AnswerIdentity(form=resume_pb2.ANSWER_FORM_GRPC)
            prepared, capability = make_resumable(prepared, identity, shown_id)
        request = prepared.request
        return _Answer(
            request_id=request.request_id,
            shown_id=shown_id,
            output=Output(self._text, prepared.output),
            begin=lambda to: self._plane.admit(request, to),
            capability=capability,
        )

    async def _resume(self, asked: router_pb2.GenerateRequest, context: Context, owner: str) -> _Answer:
        """Goes on with the output of an earlier call.

        Raises:
            FieldError: A field is wrong.
            RouterError: The output is not known, or cannot go on.
        """
        if asked.WhichOneof("prompt") is not None:
            raise FieldError("resume", "resume: the request is known from its first call; leave the prompt out")
        num_tokens, shown_id = asked.resume.num_output_tokens, asked.request_id
        found = await claim_answer(self._plane, asked.resume.capability, shown_id, owner, "resume.capability")
        state = read_state(found, resume_pb2.ANSWER_FORM_GRPC)
        found = prepare_found(found, num_tokens)
        now, remaining_s = self._plane.now(), context.time_remaining()
        prepared = restore_request(found, state, now, None if remaining_s is None else now + remaining_s)
        output = Output(self._text, prepared.output)
        stop_at = replay(output, found, num_tokens, output.take)

        def begin(response_stream: GrpcResponseStream) -> None:
            self._plane.adopt(found, prepared.request, response_stream, stop_at)
            if len(found.output_token_ids) > num_tokens:
                response_stream.flush(now)

        return _Answer(
            request_id=prepared.request.request_id,
            shown_id=shown_id,
            output=output,
            begin=begin,
            capability=asked.resume.capability,
            can_come_back=True,
        )

    async def _run(self, answer: _Answer, context: Context) -> None:
        """Begins an answer and writes its deltas until it ends.

        Raises:
            RouterError: The request failed.
        """
        request_id = answer.request_id
        task = asyncio.current_task()
        assert task is not None, "gRPC runs calls in tasks"

        def shed() -> None:
            if not answer.can_come_back:
                self._plane.cancel(request_id, "slow_reader")
            task.cancel()

        response_stream = GrpcResponseStream(answer.output, slow_readers=self._metrics.slow_readers, cancel=shed)
        answer.begin(response_stream)
        has_begun = False
        try:
            while True:
                delta, end = await response_stream.next()
                if delta or isinstance(end, Finish):
                    finish = end if isinstance(end, Finish) else None
                    part = grpc_fields.format_response(answer.shown_id, delta, finish)
                    if answer.capability and not has_begun:
                        part.resume_capability = answer.capability
                    await context.write(part)
                    has_begun = True
                    answer.can_come_back = bool(answer.capability)
                if isinstance(end, RouterError):
                    raise end
                if end is not None:
                    return
        finally:
            response_stream.close()
            if response_stream.end is None:
                leave(self._plane, request_id, response_stream if answer.can_come_back else None)

    async def _abort(self, context: grpc.aio.ServicerContext[Any, Any], error: RouterError, shown_id: str = "") -> None:
        """Ends a call with the table's status; reason, Retry-After and the request's id go with it as metadata."""
        status = error_status_of(error).grpc_status
        self._metrics.count_answer("grpc", status.name, error.code)
        metadata = [("x-sluice-reason", error.code)]
        if shown_id:
            metadata.append(("x-request-id", shown_id))
        if error.param is not None:
            metadata.append(("x-sluice-param", error.param))
        if error.retry_after_s is not None:
            metadata.append(("retry-after", f"{error.retry_after_s:.3f}"))
        await context.abort(status, error.message, tuple(metadata))


class GrpcApi:
    """The gRPC server for clients.

    Args:
        plane: The data plane.
        text: The model's text side.
        metrics: Counters and limits of slow clients, shared with HTTP.
        access: What guards it.
        max_message_bytes: Largest request.
        shares_port: Whether other processes listen on the port too.
    """

    def __init__(
        self,
        plane: DataPlane,
        text: ModelText,
        metrics: EdgeMetrics,
        *,
        access: ClientAccess = OPEN_ACCESS,
        max_message_bytes: int = 8 * 1024 * 1024,
        shares_port: bool = False,
    ) -> None:
        self._plane = plane
        self._certificates = access.certificates
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.so_reuseport", int(shares_port)),
            ]
        )
        self._health = health.aio.HealthServicer()
        self._watch: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._server.add_generic_rpc_handlers((_make_handlers(RouterService(plane, text, metrics, access.keys)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens.

        Args:
            host: Address to listen on.
            port: Port; 0 for any.

        Returns:
            The port.
        """
        address = join_address(host, port)
        if self._certificates is None:
            bound = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, make_server_credentials(self._certificates))
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._report_health(), name="report health")
        return bound

    def announce_close(self, grace_s: float) -> None:
        """Tells clients to connect elsewhere (GOAWAY), and takes no more calls; those under way go on.

        A connection lives as long as its client likes: without GOAWAY the client would send further calls on it.

        Args:
            grace_s: How long calls under way may go on at most.
        """
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._server.stop(grace_s), name="end calls")

    async def close(self, grace_s: float) -> None:
        """Accepts no more, lets calls under way end, then cuts the rest.

        Args:
            grace_s: How long calls under way may go on.
        """
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)  # the shorter grace counts
        if self._ending is not None:
            await self._ending

    async def _report_health(self) -> None:
        states = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}
        last: bool | None = None
        while True:
            if self._plane.is_ready != last:
                last = self._plane.is_ready
                for name in ("", SERVICE):
                    await self._health.set(name, states[last])
            await asyncio.sleep(HEALTH_INTERVAL_S)


def join_address(host: str, port: int) -> str:
    """The address of a host, which may be an IPv6 address, and a port, as gRPC reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _make_handlers(service: RouterService) -> grpc.GenericRpcHandler:
    """Makes the service's handlers. They also take bytes that are no message, which gRPC answers with a traceback."""
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.Generate,
            request_deserializer=partial(_parse, router_pb2.GenerateRequest),
            response_serializer=router_pb2.GenerateResponse.SerializeToString,
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            service.ListModels,
            request_deserializer=partial(_parse, router_pb2.ListModelsRequest),
            response_serializer=router_pb2.ListModelsResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _parse(kind: type[Message], data: bytes) -> Message | DecodeError:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        return error


def _describe_garbage(error: DecodeError) -> InvalidRequestError:
    return InvalidRequestError(f"the request is not the method's message: {error}", code="malformed_message")
