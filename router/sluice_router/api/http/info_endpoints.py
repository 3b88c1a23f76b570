"""Endpoints of the HTTP API that ask no engine: models, health, metrics, version, explanations."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from sluice_router.api.http.http_errors import refuse
from sluice_router.api.openai_responses import strip_id_prefix
from sluice_router.errors import (
    InvalidRequestError,
    ModelNotFoundError,
)
from sluice_router.scheduling.requests import DataPlane
from sluice_router.text.tokenizer import ModelText

MODELS_PREFIX = "/v1/models/"
DEBUG_PREFIX = "/debug/requests/"
METRICS_PATH = "/metrics"
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DISTRIBUTION = "sluice-serve"
MAX_QUOTED_ID_CHARACTERS = 128


class InfoEndpoints:
    """Everything served with GET.

    Args:
        plane: The data plane.
        text: The model's text side.
        hidden: Paths of these not to serve.
    """

    def __init__(
        self,
        plane: DataPlane,
        text: ModelText,
        *,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._plane = plane
        self._text = text
        self.is_closing = False
        self._handlers: dict[str, Callable[[], web.Response]] = {
            "/v1/models": self._list_models,
            "/version": self._show_version,
            "/health": self._show_readiness,
            "/readyz": self._show_readiness,
            "/livez": self._show_liveness,
            METRICS_PATH: self._show_metrics,
        }
        self._hidden = hidden

    def find(self, path: str) -> Callable[[], web.Response] | None:
        """Finds what answers ``path``, as aiohttp has decoded it, or None."""
        if path in self._hidden:
            return None
        if path.startswith(MODELS_PREFIX):
            return partial(self._show_model, path.removeprefix(MODELS_PREFIX))
        if path.startswith(DEBUG_PREFIX):
            return partial(self._explain, path.removeprefix(DEBUG_PREFIX))
        return self._handlers.get(path)

    def _list_models(self) -> web.Response:
        return web.json_response({"object": "list", "data": [self._describe_model()] if self._plane.model.name else []})

    def _show_model(self, name: str) -> web.Response:
        if name != self._plane.model.name:
            raise ModelNotFoundError(f"model {name[:MAX_QUOTED_ID_CHARACTERS]!r} does not exist", param="model")
        return web.json_response(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        model = self._plane.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "sluice",
            "max_model_len": model.max_model_len_tokens or self._text.defaults.max_model_len_tokens,
        }

    def _show_version(self) -> web.Response:
        return web.json_response({"version": importlib.metadata.version(DISTRIBUTION)})

    def _show_liveness(self) -> web.Response:
        return web.json_response({"status": "ok"})

    def _show_readiness(self) -> web.Response:
        if self._plane.is_ready and not self.is_closing:
            return web.json_response({"status": "ok"})
        reason = "closing" if self.is_closing else self._plane.not_ready_reason
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    def _show_metrics(self) -> web.Response:
        return web.Response(body=self._plane.format_metrics(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    def _explain(self, request_id: str) -> web.Response:
        # A client may have an id of its own that begins like an answer's.
        story = self._plane.explain(request_id) or self._plane.explain(strip_id_prefix(request_id))
        if story is None:
            message = (
                f"request {request_id[:MAX_QUOTED_ID_CHARACTERS]!r} is unknown, or its decisions are no longer kept"
            )
            return refuse(InvalidRequestError(message, code="unknown_request"), status=404)
        return web.json_response(story)
