"""How far an answer over HTTP is; the coroutine that answers waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sluice_router.api.openai_responses import AnswerFormat, add_usages
from sluice_router.errors import RouterError
from sluice_router.scheduling.requests import Finish, Usage


class AnswerProgress:
    """How far an answer's choices are, each of which is a request of its own; the first that fails fails the answer.

    Args:
        num_choices: Of the answer.
        n: Choices per prompt.
    """

    def __init__(self, num_choices: int, n: int) -> None:
        loop = asyncio.get_running_loop()
        self._n = n
        self._usages: list[Usage | None] = [None] * num_choices
        self._num_open = self._num_unwritten = num_choices
        self._error: RouterError | None = None
        self._open: Callable[[], None] | None = None
        self._fault: Exception | None = None
        self._first: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()

    @property
    def is_over(self) -> bool:
        """Whether the data plane has said how every choice ended."""
        return self._num_open == 0

    def open_with(self, begin: Callable[[], None]) -> None:
        """Has ``begin`` called as soon as there is something to send: now, or when it comes, with no turn in between.

        Not called if the answer fails before that.
        """
        self._open = begin
        if self._first.done():
            self.announce()

    def announce(self) -> None:
        """Notes that there is something to send."""
        begin, self._open = self._open, None
        if begin is not None and self._error is not None:
            self.conclude()
        elif begin is not None:
            try:
                begin()
            except Exception as fault:
                # The data plane gives this answer up, and who waits for its end must hear of it.
                self._fault = fault
                self.conclude()
                raise
        if not self._first.done():
            self._first.set_result(None)

    def note_end(self, index: int, end: Finish | RouterError) -> None:
        """Notes how a choice ended."""
        self._num_open -= 1
        if isinstance(end, Exception):
            self._error = self._error or end
        else:
            self._usages[index] = end.usage

    def note_written(self) -> bool:
        """Notes that a choice's end is written; returns whether it was the last one."""
        self._num_unwritten -= 1
        return self._num_unwritten == 0

    @property
    def usage(self) -> Usage:
        """Usage of the whole answer; every choice has ended well."""
        return add_usages([usage for usage in self._usages if usage is not None], self._n)

    def conclude(self) -> None:
        """Notes that nothing more goes out."""
        if not self._over.done():  # the client may have gone in this very tick
            self._over.set_result(None)

    async def wait_first(self) -> None:
        """Waits until there is something to send: what fails before that gets an HTTP status of its own.

        Raises:
            RouterError: The request failed before that.
        """
        await self._first
        self.raise_error()

    async def wait_news(self, timeout_s: float) -> bool:
        """Waits until there is something to send, an error included; returns whether there is by then."""
        await asyncio.wait([self._first], timeout=timeout_s)
        return self._first.done()

    async def wait_over(self) -> None:
        """Waits until nothing more goes out, or the answer has failed before there was anything."""
        await self._over
        if self._fault is not None:
            raise self._fault

    def raise_error(self) -> None:
        """Raises the error that the answer failed with, if it did."""
        if self._error is not None:
            raise self._error


class WholeAnswer:
    """An answer that does not stream.

    Args:
        progress: Of its choices.
        answer: The endpoint's form.
        num_choices: Of the answer.
    """

    def __init__(self, progress: AnswerProgress, answer: AnswerFormat, num_choices: int) -> None:
        self._answer = answer
        self.progress = progress
        self.choices: list[dict[str, Any]] = [{}] * num_choices

    async def wait(self) -> dict[str, Any]:
        """Waits for the answer.

        Returns:
            The body.

        Raises:
            RouterError: A choice failed.
        """
        await self.progress.wait_first()
        return self._answer.whole(self.choices, self.progress.usage)
