"""A small streaming client of the OpenAI API that measures TTFT and gaps."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp


@dataclass(slots=True, kw_only=True)
class CompletionStream:
    """One streamed answer.

    Args:
        request_id: The router's id.
        text: The answer so far.
        ttft_s: Time to the first piece, in seconds.
        longest_gap_s: Longest wait between two pieces, in seconds.
        output_tokens: Tokens that the answer's usage names.
        finish_reason: Why it ended; empty when the stream broke.
    """

    request_id: str = ""
    text: str = ""
    ttft_s: float = 0.0
    longest_gap_s: float = 0.0
    output_tokens: int = 0
    finish_reason: str = ""
    _last_s: float = field(default=0.0, repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended with a finish reason."""
        return bool(self.finish_reason)

    def take(self, event: dict[str, Any], now_s: float, started_s: float) -> str:
        """Takes one event; returns its text."""
        self.output_tokens = (event.get("usage") or {}).get("completion_tokens", self.output_tokens)
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            piece: str = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if not piece:
                continue
            if self._last_s:
                self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s)
            else:
                self.ttft_s = now_s - started_s
            self._last_s = now_s
            self.text += piece
            return piece
        return ""


async def stream_completion(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    on_text: Callable[[str], None] | None = None,
) -> CompletionStream:
    """Streams one answer.

    Args:
        session: HTTP connections.
        url: Of the router's OpenAI API.
        body: Of the request; ``messages`` makes it a chat, ``prompt`` a completion.
        on_text: Called with each piece of text.

    Raises:
        aiohttp.ClientError: The router refused it, or the connection broke.
    """
    path = "chat/completions" if "messages" in body else "completions"
    stream, started_s = CompletionStream(), time.monotonic()
    content = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"{url}/v1/{path}", json=content) as response:
        response.raise_for_status()
        stream.request_id = response.headers.get("x-request-id", "")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            piece = stream.take(json.loads(line[6:]), time.monotonic(), started_s)
            if piece and on_text:
                on_text(piece)
    return stream
