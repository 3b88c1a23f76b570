"""The messages of ``core_messages`` as plain data, and back."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from sluice_engine.core_messages import (
    EXTRAS_KEY,
    NUM_TOKENS_KEY,
    Answer,
    Command,
    HandedOffKv,
    RequestExtras,
    SchedulerReport,
)


def encode_commands(commands: list[Command]) -> list[dict[str, Any]]:
    """Plain data for ``call_utility_async(UTILITY, ...)``.

    The EngineCore carries a batch out between two iterations, whole and in order, after the submits and aborts that
    were sent before it.
    """
    encoded: list[dict[str, Any]] = msgspec.to_builtins(commands)
    return encoded


def decode_commands(encoded: list[dict[str, Any]]) -> list[Command]:
    """Reverse of ``encode_commands``.

    Raises:
        msgspec.ValidationError: Not a batch of commands.
    """
    return msgspec.convert(encoded, list[Command])


def encode_answers(answers: list[Answer]) -> list[dict[str, Any]]:
    """Plain data for the utility's result."""
    encoded: list[dict[str, Any]] = msgspec.to_builtins(answers)
    return encoded


def decode_answers(encoded: list[dict[str, Any]]) -> list[Answer]:
    """Reverse of ``encode_answers``."""
    return msgspec.convert(encoded, list[Answer])


def encode_report(report: SchedulerReport) -> dict[str, Any]:
    """Plain data for the ``kv_transfer_params`` of the reserved output."""
    encoded: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return encoded


def decode_report(kv_transfer_params: dict[str, Any]) -> SchedulerReport:
    """Reads the report of the output whose request id is ``REPORT_ID``."""
    return msgspec.convert(kv_transfer_params, SchedulerReport, strict=False)


def decode_extras(extra_args: dict[str, Any] | None) -> RequestExtras:
    """Reads a request's extras; a request without any gets the defaults.

    Raises:
        msgspec.ValidationError: Not extras.
    """
    return msgspec.convert((extra_args or {}).get(EXTRAS_KEY, {}), RequestExtras)


def decode_hand_off(kv_transfer_params: dict[str, Any] | None) -> HandedOffKv | None:
    """Reads where a handed-off request's KV lies.

    Args:
        kv_transfer_params: Of the output with which the request ended.

    Returns:
        None when the request was not handed off, so that its finish reason means what it says.
    """
    if not kv_transfer_params or NUM_TOKENS_KEY not in kv_transfer_params:
        return None
    return HandedOffKv(
        num_tokens=kv_transfer_params[NUM_TOKENS_KEY],
        transfer_params=json.dumps(kv_transfer_params, separators=(",", ":")),
    )
