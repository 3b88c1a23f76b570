"""One request's output: detokenizes, finds the stop string, and gathers what has not gone out yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.v1 import engine_pb2
from sluice_router.text.stop_strings import StopStrings
from sluice_router.text.tokenizer import ModelText

# Memory of one token's logprobs without alternatives, and of one alternative, while a client is paused; estimates.
LOGPROB_BYTES = 120
ALTERNATIVE_BYTES = 16
TOKEN_ID_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSettings:
    """How a request wants its output.

    Args:
        stops: Strings that end the output.
        is_stop_included: Whether what ended the output stays in its text.
        hidden_token_ids: Tokens that end the output and have no text then.
        skip_special_tokens: Whether special tokens have no text.
        min_tokens: Output tokens before which stop strings do not count.
        num_logprobs: Alternatives per token; None: no logprobs.
        returns_token_ids: Whether the answer has token ids.
    """

    stops: tuple[str, ...] = ()
    is_stop_included: bool = False
    hidden_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    min_tokens: int = 0
    num_logprobs: int | None = None
    returns_token_ids: bool = False

    @property
    def keeps_tokens(self) -> bool:
        """Whether deltas carry tokens beside the text."""
        return self.returns_token_ids or self.num_logprobs is not None


@dataclass(slots=True)
class Delta:
    """What has come and has not gone out.

    Args:
        text: Text.
        token_ids: Its tokens, where the request wants them.
        logprobs: Their logprobs, where the request wants them.
        first_index: Index of the first token in the output.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.TokenLogprobs] = field(default_factory=list)
    first_index: int = 0

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


class Output:
    """The output of one request.

    Args:
        text: The model's text side.
        settings: How the request wants its output.

    Attributes:
        num_tokens: Tokens taken.
        first_index: Index of the first token that has not gone out.
    """

    __slots__ = (
        "_detokenizer",
        "_hidden",
        "_keeps_tokens",
        "_logprobs",
        "_more",
        "_num_kept_bytes",
        "_settings",
        "_stops",
        "_text",
        "_token_ids",
        "first_index",
        "num_tokens",
    )

    def __init__(self, text: ModelText, settings: OutputSettings) -> None:
        self._settings = settings
        self._keeps_tokens = settings.keeps_tokens
        self._detokenizer = text.make_detokenizer(skip_special_tokens=settings.skip_special_tokens)
        self._stops = StopStrings(settings.stops, is_included=settings.is_stop_included) if settings.stops else None
        self._hidden = frozenset() if settings.is_stop_included else settings.hidden_token_ids
        # Mostly one piece of text comes before it goes out: it needs no list, whose memory would have to be fetched.
        self._text = ""
        self._more: list[str] = []
        # Memory of further pieces, and of tokens.
        self._num_kept_bytes = 0
        self._token_ids: list[int] = []
        self._logprobs: list[engine_pb2.TokenLogprobs] = []
        self.first_index = 0
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Memory of what has not gone out; an estimate."""
        return self._num_kept_bytes + _estimate_bytes(self._text)

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the output."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> int | None:
        """Takes the next token and, when the request asked for them, its logprobs.

        Returns:
            None, or the number of output tokens when a stop string ended the output.
        """
        self.num_tokens += 1
        if self._keeps_tokens:
            self._keep_token(token_id, logprobs)
        text = "" if token_id in self._hidden else self._detokenizer.step(token_id)
        stops = self._stops
        if stops is not None:
            text = stops.push(text, is_armed=self.num_tokens > self._settings.min_tokens)
        if text:
            self._append(text)
        return self.num_tokens if stops is not None and stops.matched is not None else None

    def finish(self) -> None:
        """Releases what was held back; the output has ended."""
        text = self._detokenizer.flush()
        if self._stops is not None:
            if self._stops.matched is not None:
                return
            text = self._stops.push(text, is_armed=self.num_tokens > self._settings.min_tokens)
            if self._stops.matched is None:
                text += self._stops.flush()
        if text:
            self._append(text)

    def take(self) -> Delta:
        """Hands out what has come since the last call."""
        first_index = self.first_index
        token_ids, logprobs = self._token_ids, self._logprobs
        if self._keeps_tokens:
            self._token_ids, self._logprobs = [], []
        return Delta(self.take_text(), token_ids, logprobs, first_index)

    def take_text(self) -> str:
        """Hands out the text that has come since the last call; outputs that are text alone need no delta."""
        text, self._text = self._text, ""
        if self._num_kept_bytes:
            text += "".join(self._more)
            self._more.clear()
            self._num_kept_bytes = 0
        self.first_index = self.num_tokens
        return text

    def _append(self, text: str) -> None:
        if not self._text:
            self._text = text
        else:
            self._more.append(text)
            self._num_kept_bytes += _estimate_bytes(text)

    def _keep_token(self, token_id: int, logprobs: engine_pb2.TokenLogprobs | None) -> None:
        self._token_ids.append(token_id)
        self._num_kept_bytes += TOKEN_ID_BYTES
        if self._settings.num_logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
            self._num_kept_bytes += LOGPROB_BYTES + ALTERNATIVE_BYTES * len(logprobs.top_token_ids)


def _estimate_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
