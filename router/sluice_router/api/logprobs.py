"""Logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

import itertools
from typing import Any

from sluice.v1 import engine_pb2
from sluice_router.text.output import Delta
from sluice_router.text.tokenizer import ModelText

# JSON has no infinity; vLLM and OpenAI answer this instead.
LEAST_LOGPROB = -9999.0


def format_completion_logprobs(
    delta: Delta, text: ModelText, num_logprobs: int, text_offset: int
) -> tuple[dict[str, Any], int]:
    """Formats logprobs for ``/v1/completions``: parallel lists, alternatives as an object.

    Args:
        delta: Tokens with logprobs.
        text: Decodes single tokens.
        num_logprobs: Alternatives per token; the token itself comes on top.
        text_offset: Characters of the tokens before, whether their text has gone out or is held back.

    Returns:
        The logprobs, and the offset behind them.
    """
    tokens = [text.decode_token(token_id)[0] for token_id in delta.token_ids]
    offsets = list(itertools.accumulate(map(len, tokens), initial=text_offset))
    logprobs = {
        "tokens": tokens,
        "token_logprobs": [_bound(entry.logprob) for entry in delta.logprobs],
        "top_logprobs": [
            {token: _bound(entry.logprob)}
            | {
                text.decode_token(token_id)[0]: _bound(logprob)
                for token_id, logprob in _alternatives(entry, num_logprobs)
            }
            for token, entry in zip(tokens, delta.logprobs, strict=False)
        ],
        "text_offset": offsets[:-1],
    }
    return logprobs, offsets[-1]


def format_chat_logprobs(delta: Delta, text: ModelText, num_logprobs: int) -> dict[str, Any]:
    """Formats logprobs for ``/v1/chat/completions``: one object per token; see ``format_completion_logprobs``."""
    return {
        "content": [
            {
                **_describe(token_id, entry.logprob, text),
                "top_logprobs": [
                    _describe(other, logprob, text) for other, logprob in _alternatives(entry, num_logprobs)
                ],
            }
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False)
        ]
    }


def _alternatives(entry: engine_pb2.TokenLogprobs, num_logprobs: int) -> list[tuple[int, float]]:
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_logprobs]


def _describe(token_id: int, logprob: float, text: ModelText) -> dict[str, Any]:
    token, data = text.decode_token(token_id)
    return {"token": token, "logprob": _bound(logprob), "bytes": list(data)}


def _bound(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
