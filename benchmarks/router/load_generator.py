"""Orders to the load generator, and its results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# The generator's counters of failed requests. Its other counters mean no failure.
ERRORS = ("dropped", "refused", "broken", "status", "short", "wrong_tokens", "error_events", "stuck")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficWorkload:
    """A load and the engines under it.

    Args:
        concurrency: Streams that run at any time; 0: open loop at ``rate``.
        rate: Requests per second, Poisson; 0: fixed concurrency.
        num_tokens: Tokens of an answer.
        prompt_tokens: Tokens of a prompt.
        is_unary: Whole answers instead of streams.
        slow_percent: Share of clients that stop reading after the first token, for ``stall_s``.
        stall_s: How long they stop.
        disconnect_percent: Share of answers that the client cuts in the middle.
        warmup_s: Time before the window; connections open in its first half.
        seconds: Length of the window.
        num_engines: Emulated engines.
        step_us: Time between two steps of an engine, in microseconds.
        chunk_tokens: Tokens per step, decodes included.
        is_lockstep: All engines step at once, instead of staggered.
        seed: Seed of the generator's random numbers.
        faults: Faults of the emulated engines (KIND:ENGINE:AT_S[:FOR_S], see engine_stub.py); HTTP stubs have none.
    """

    concurrency: int = 0
    rate: float = 0.0
    num_tokens: int = 200
    prompt_tokens: int = 128
    is_unary: bool = False
    slow_percent: float = 0.0
    stall_s: float = 5.0
    disconnect_percent: float = 0.0
    warmup_s: float = 3.0
    seconds: float = 5.0
    num_engines: int = 32
    step_us: float = 33333.0
    chunk_tokens: int = 2048
    is_lockstep: bool = False
    seed: int = 1
    faults: tuple[str, ...] = ()

    def load_arguments(self) -> list[str]:
        """Arguments of the load generator, without ports and files."""
        arguments = [
            *(("--concurrency", self.concurrency) if self.concurrency else ("--rate", self.rate)),
            *("--tokens", self.num_tokens, "--prompt-tokens", self.prompt_tokens),
            *("--slow-percent", self.slow_percent, "--stall-s", self.stall_s),
            *("--disconnect-percent", self.disconnect_percent),
            *("--warmup-s", self.warmup_s, "--seconds", self.seconds, "--seed", self.seed),
        ]
        return [*map(str, arguments), *(["--unary"] if self.is_unary else [])]

    def fault_arguments(self) -> list[str]:
        """Arguments of the engine stub for its faults."""
        return [argument for fault in self.faults for argument in ("--fault", fault)]

    def stub_arguments(self) -> list[str]:
        """Arguments of either stub, without port and files."""
        arguments = ("--engines", self.num_engines, "--step-us", self.step_us, "--chunk-tokens", self.chunk_tokens)
        return [*map(str, arguments), *(["--lockstep"] if self.is_lockstep else [])]

    def describe(self) -> str:
        """Describes the load in one line."""
        shape = f"{self.concurrency} streams" if self.concurrency else f"{self.rate:g} requests/s (Poisson)"
        offered = self.concurrency * 1e6 / self.step_us if self.concurrency and not self.is_unary else 0
        parts = [
            shape + (f", {offered:,.0f} tokens/s offered" if offered else ""),
            f"answers of {self.num_tokens} tokens" + (" (unary)" if self.is_unary else ""),
            f"prompts of {self.prompt_tokens} tokens",
            f"{self.num_engines} engines, steps of {self.step_us / 1000:.1f} ms"
            + (", in lockstep" if self.is_lockstep else ", staggered"),
            f"window {self.seconds:g} s",
        ]
        if self.slow_percent:
            parts.append(f"{self.slow_percent:g} % of clients stall for {self.stall_s:g} s")
        if self.disconnect_percent:
            parts.append(f"{self.disconnect_percent:g} % of answers are cut by the client")
        if self.faults:
            parts.append(f"faults of the engines behind sluice: {', '.join(self.faults)}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Returns the values for the result file."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of one kind of latency; NaN without samples.

    Args:
        p50_ms: Median.
        p99_ms: 99th percentile.
        p999_ms: 99.9th percentile.
    """

    p50_ms: float = float("nan")
    p99_ms: float = float("nan")
    p999_ms: float = float("nan")

    @classmethod
    def read(cls, values: Mapping[str, float]) -> Percentiles:
        """Reads a histogram of the generator's answer."""
        nan = float("nan")
        return cls(**{name: values.get(name, nan) for name in ("p50_ms", "p99_ms", "p999_ms")})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The generator's results.

    Args:
        seconds: Length of the window.
        offered_tokens: Tokens that the stub sent in the window.
        tokens: Tokens that clients read.
        requests_finished: Complete and correct answers.
        num_errors: Requests that failed, wrong tokens included.
        first_error: Description of the first error.
        slow_aborted: Stalled clients whose stream the router ended.
        token_latency: From the stub's stamp of a token to the client's read.
        added_ttft: Way of a request to the stub plus way of its first token back.
        itl: Gaps between tokens at the client.
        sent_gap: Gaps between tokens at the stub: a step, unless the stub is late.
        raw: The whole result.
    """

    seconds: float
    offered_tokens: int
    tokens: int
    requests_finished: int
    num_errors: int
    first_error: str
    slow_aborted: int
    token_latency: Percentiles
    added_ttft: Percentiles
    itl: Percentiles
    sent_gap: Percentiles
    raw: Mapping[str, Any]

    @classmethod
    def parse(cls, line: str) -> LoadResult:
        """Reads the generator's line of JSON.

        Raises:
            ValueError: The line has another form.
        """
        raw = json.loads(line)
        return cls(
            seconds=raw["seconds"],
            offered_tokens=raw["offered_tokens"],
            tokens=raw["tokens"],
            requests_finished=raw["requests_finished"],
            num_errors=sum(raw["errors"].get(name, 0) for name in ERRORS),
            first_error=raw["first_error"],
            slow_aborted=raw.get("slow_aborted", 0),
            token_latency=Percentiles.read(raw["token_latency"]),
            added_ttft=Percentiles.read(raw.get("added_ttft", {})),
            itl=Percentiles.read(raw.get("itl", {})),
            sent_gap=Percentiles.read(raw.get("sent_gap", {})),
            raw=raw,
        )
