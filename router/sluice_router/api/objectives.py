"""What a request asks of its latency, from headers and body.

Precedence: the plan's default, the class, the headers, the body; the last one given wins, each field on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sluice_router.api.openai_requests import (
    MAX_NAME_CHARACTERS,
    MAX_PRIORITY,
    MAX_TPOT_MS,
    MAX_TTFT_MS,
    FieldError,
    SluiceOptions,
    quote,
)

TTFT_HEADERS = ("x-sluice-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
TPOT_HEADERS = ("x-sluice-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
CLASS_HEADER = "x-sluice-slo-class"
PRIORITY_HEADER = "x-sluice-priority"
# Of every header that is read here.
PREFIXES = ("x-sluice-", "x-llm-d-slo-")
HEADERS = frozenset({*TTFT_HEADERS, *TPOT_HEADERS, CLASS_HEADER, PRIORITY_HEADER})
# Headers of ours that say nothing of latency: whether a stream can be resumed, and by what.
RESUMABLE_HEADER = "x-sluice-resumable"
CAPABILITY_HEADER = "x-sluice-resume"
KNOWN_HEADERS = HEADERS | {RESUMABLE_HEADER, CAPABILITY_HEADER}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestObjectives:
    """Objectives that a request states itself; None: its class's.

    Args:
        ttft_slo_s: Objective for the time to first token, in seconds.
        tpot_slo_s: Objective for the time per output token, in seconds.
        slo_class: Name of the class; empty for the default.
        priority: Higher goes first.
    """

    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    slo_class: str = ""
    priority: int | None = None


NO_OBJECTIVES = RequestObjectives()


def read_objectives(headers: Mapping[str, str], options: SluiceOptions | None) -> RequestObjectives:
    """Reads the objectives of a request.

    Args:
        headers: Its headers; case does not matter.
        options: The body's field ``sluice``.

    Raises:
        FieldError: A header is unknown, not an integer, or out of bounds.
    """
    if options is None and not any(name.lower().startswith(PREFIXES) for name in headers):
        return NO_OBJECTIVES
    _refuse_unknown(headers)
    options = options or SluiceOptions()
    ttft_ms = _first(options.slo_ttft_ms, _read_integer(headers, TTFT_HEADERS, 1, MAX_TTFT_MS))
    tpot_ms = _first(options.slo_tpot_ms, _read_integer(headers, TPOT_HEADERS, 1, MAX_TPOT_MS))
    slo_class = headers.get(CLASS_HEADER, "") if options.slo_class is None else options.slo_class
    if len(slo_class) > MAX_NAME_CHARACTERS:
        raise FieldError(
            CLASS_HEADER, f"{CLASS_HEADER}: at most {MAX_NAME_CHARACTERS} characters, not {len(slo_class)}"
        )
    return RequestObjectives(
        ttft_slo_s=None if ttft_ms is None else ttft_ms / 1000,
        tpot_slo_s=None if tpot_ms is None else tpot_ms / 1000,
        slo_class=slo_class,
        priority=_first(options.priority, _read_integer(headers, (PRIORITY_HEADER,), -MAX_PRIORITY, MAX_PRIORITY)),
    )


def _refuse_unknown(headers: Mapping[str, str]) -> None:
    """Refuses what is ours by its name and nobody's by its meaning: an objective with a typo would not be met."""
    for name in headers:
        lower = name.lower()
        if lower.startswith(PREFIXES) and lower not in KNOWN_HEADERS:
            raise FieldError(lower, f"{lower} is no header of Sluice; known are {', '.join(sorted(KNOWN_HEADERS))}")


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _read_integer(headers: Mapping[str, str], names: tuple[str, ...], least: int, most: int) -> int | None:
    for name in names:
        text = headers.get(name)
        if text is None:
            continue
        digits = text.strip().removeprefix("-")
        # int() also takes "1_000", " 7" and other scripts' digits; and refuses thousands of digits its own way.
        value = int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 10 else None
        if value is None or not least <= value <= most:
            raise FieldError(name, f"{name}: must be an integer from {least} to {most}, not {quote(text)}")
        return value
    return None
