"""Comments that keep a streamed answer's connection alive while its request is held."""

from __future__ import annotations

from collections.abc import Callable

from sluice_router.api.http.answer_progress import AnswerProgress
from sluice_router.api.http.http_stream import HttpStream

COMMENT_INTERVAL_S = 10.0
# Of an answer that waits for the first engine: readers of server-sent events skip lines that begin with a colon.
HELD_COMMENT = b": waiting for an engine\n\n"


async def comment_until_news(
    progress: AnswerProgress, open_held: Callable[[], HttpStream], interval_s: float
) -> HttpStream | None:
    """Begins an answer with comments while its request is held, so that neither client nor proxy gives up.

    Args:
        progress: Of the answer.
        open_held: Begins the stream.
        interval_s: Between two comments.

    Returns:
        The stream, once there is something to send; None: nothing has been written by then.
    """
    stream: HttpStream | None = None
    while not await progress.wait_news(interval_s):
        if stream is None:
            stream = open_held()
            stream.release()
        stream.write(HELD_COMMENT)
    return stream
