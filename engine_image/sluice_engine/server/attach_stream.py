"""One Attach stream of a router: messages wait here for the stream's one writer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sluice.v1 import engine_pb2 as wire

# Messages that may wait for a router that does not read; its stream is cut beyond that.
MAX_WAITING_MESSAGES = 4096


class MessageWriter(Protocol):
    """The part of grpc.aio's context that a stream uses."""

    async def write(self, message: wire.AttachResponse) -> None:
        """Sends one message, and returns when the next may be sent."""


class AttachStream:
    """Messages on their way to a router.

    Only ``write`` waits, and only one task calls it: two writes at once kill a grpc.aio stream.
    """

    def __init__(self) -> None:
        self._waiting: deque[wire.AttachResponse] = deque()
        self._has_news = asyncio.Event()
        self._is_written = asyncio.Event()
        self._is_closed = False

    def send(self, message: wire.AttachResponse) -> None:
        """Hands a message to the writer; a router that does not read loses its stream."""
        if self._is_closed:
            return
        if len(self._waiting) >= MAX_WAITING_MESSAGES:
            self.close()
            return
        self._waiting.append(message)
        self._has_news.set()

    def close(self) -> None:
        """Lets the writer end after what waits."""
        self._is_closed = True
        self._has_news.set()

    async def write(self, writer: MessageWriter) -> None:
        """Sends messages until the stream is closed and empty."""
        try:
            while True:
                while self._waiting:
                    await writer.write(self._waiting.popleft())
                if self._is_closed:
                    return
                self._has_news.clear()
                await self._has_news.wait()
        finally:
            self._is_closed = True
            self._is_written.set()

    async def wait_written(self) -> None:
        """Waits until everything is sent, or can no longer be."""
        await self._is_written.wait()
