"""Compiles constraints with the library that every engine compiles them with, so that all refuse the same ones.

A constraint is compiled for the alphabet of bytes, which takes milliseconds whatever the model's vocabulary.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import llguidance

# What the items of all arrays of a schema may add up to; the library takes seconds for millions of them.
MAX_EXPANDED_ITEMS = 20_000
# The mask has a bit for each byte, and behind them others for the end.
NUM_BYTES_OF_ALPHABET = 256 // 8
# Bytes of an output that are tried: what is too complex for the library may show only behind the first brace.
NUM_TRIED_BYTES = 8
# Which of them, where the constraint leaves a choice: into objects, lists and texts rather than past them.
PREFERRED_BYTES = b'{["' + bytes(range(ord("a"), ord("z") + 1))
_COUNTS = ("minItems", "maxItems")
# Kinds that the library calls as vLLM does.
_TEXT_KINDS = frozenset({"regex", "grammar", "choice"})


class GrammarError(ValueError):
    """A constraint cannot be compiled."""


def check_grammar(kind: str, value: Any) -> None:
    """Checks that a constraint can be compiled, and allows some output whose beginning the library can follow.

    Args:
        kind: vLLM's name of it: ``json``, ``json_object``, ``regex``, ``choice`` or ``grammar``.
        value: JSON text, a pattern, a list of texts or a grammar.

    Raises:
        GrammarError: It cannot, for a reason that the message gives.
    """
    try:
        matcher = llguidance.LLMatcher(_byte_tokenizer(), _serialize(kind, value), log_level=0)
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from error
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    # Only a step shows a rule that refers to nothing but itself.
    allowed = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError("it allows no output")
    if not any(allowed[:NUM_BYTES_OF_ALPHABET]):
        raise GrammarError("it allows no output but the empty one")
    for _ in range(NUM_TRIED_BYTES):
        byte = _choose_byte(allowed)
        if byte is None or not matcher.consume_token(byte) or matcher.is_stopped():
            break
        allowed = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())


def check_expansion(schema: Any) -> None:
    """Checks the size that a JSON schema expands to, before anything compiles it.

    Raises:
        GrammarError: It is too large.
    """
    size, rest = 0, [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            size += max((part[name] for name in _COUNTS if isinstance(part.get(name), int | float)), default=0)
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)
    if size > MAX_EXPANDED_ITEMS:
        names = " and ".join(_COUNTS)
        raise GrammarError(f"{names} add up to {size:g}; the limit is {MAX_EXPANDED_ITEMS}")


def _serialize(kind: str, value: Any) -> str:
    """Writes a constraint as vLLM's guidance backend does."""
    if kind in _TEXT_KINDS:
        grammar: str = llguidance.grammar_from(kind, json.dumps(value) if kind == "choice" else value)
        return grammar
    schema = '{"type": "object"}' if kind == "json_object" else value
    written: str = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
    return written


def _choose_byte(allowed: bytes) -> int | None:
    """Chooses the next byte of an output; None: only its end is allowed."""
    candidates = [byte for byte in range(NUM_BYTES_OF_ALPHABET * 8) if allowed[byte // 8] >> byte % 8 & 1]
    return next((byte for byte in PREFERRED_BYTES if byte in candidates), candidates[-1] if candidates else None)


@functools.cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
