"""What a simulation is given: engines, requests, options, and what happens to the cluster meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice_core.latency.iteration_time import IterationProfile
from sluice_core.latency.transfer import LINKS, LinkSpeed
from sluice_core.records import EngineId, Role, Slo
from sluice_core.strategies import Strategy
from sluice_core.strategy_parameters import StrategyParameters

HOST_BYTES_PER_S = 50e9  # PCIe 5.0 x16 between host and GPU, each direction; 4.0: half of it (latency.transfer)
BLOCK_SIZE_TOKENS = 16  # as in vLLM
MAX_NUM_SEQS = 256  # 128, Vidur's default, in the cells made with Vidur
MAX_BATCH_TOKENS = 16_384  # batch of an unchunked prefill engine
MESSAGE_S = 0.0037  # with four busy engines and a router on two cores
# For processes that simulate: new containers between two collections. A run makes many and hardly a cycle; the default
# costs a tenth of its time.
GC_THRESHOLD = 200_000


class LengthsKnown(StrEnum):
    """What a router knows of output lengths, where its strategy asks for them."""

    LEARNED = "learned"
    EXACT = "exact"
    NOISY = "noisy"


class NoGrant(StrEnum):
    """What a finished prefill does when no engine grants it blocks."""

    IN_PLACE = "in_place"
    WAIT = "wait"


class TtftEnd(StrEnum):
    """When TTFT ends."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    DECODE_JOIN = "decode_join"


def count_host_blocks(host_gib: float, kv_bytes_per_token: int, block_size_tokens: int) -> int:
    """Count the KV blocks that a host's memory has room for: see ``EngineSetup.host_kv_blocks``."""
    return int(host_gib * 2**30) // (kv_bytes_per_token * block_size_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """Semantics that papers and the product differ in. Defaults: the product.

    Args:
        no_grant: What a finished prefill does without a grant: ``in_place`` leaves it to the strategy, ``wait`` lets it
            wait for ever under every strategy.
        ttft_end: When TTFT ends.
        counts_decodes: The chunk size counts decodes; False: prefill tokens only, as some papers count.
        schedules_ahead: Engines schedule an iteration while another runs, as vLLM does on GPUs: whatever comes to an
            engine meanwhile waits for both. False: papers, whose simulators know no such delay.
        copies_kv: Where engines schedule ahead, the target copies full KV blocks while the source decodes on, and only
            the tail stops the stream. False: the request stops while all of its KV moves, as in the papers.
        hash_block_tokens: Tokens that each of a request's ``block_hashes`` names: requests reuse KV blocks that an
            engine still has (``sim.prefix_cache``). None: they do not.
        wait_limit_s: Longest time that the router keeps a request before it refuses it. None: for ever.
        message_s: Time of a message from an engine's scheduler to a router, or back, where engines schedule ahead.
        prefix_report_s: Time from the end of an iteration until the router knows which KV blocks it has cached and
            which were evicted. None: it never does. Only with ``hash_block_tokens``.
        output_lengths: What the router knows of output lengths: what a product can know, the truth, or the truth with
            normal errors.
        length_deviation_tokens: Standard deviation of those errors.
        sends_parts: The KV of a prompt that is cut goes over the link as it is computed; False: all in the end.
        knows_host_kv: What the router knows of prefix caches includes ``EngineSetup.host_kv_blocks``, as if these were
            in GPU memory. False: GPU memory only.
        report_s: Time until a router knows the load that an engine reports, and its answer to a grant request.

    Raises:
        ValueError: Hashes of nothing, no time to wait, messages that are there before they are sent, or reports of
            caches that there are not.
    """

    no_grant: NoGrant = NoGrant.IN_PLACE
    ttft_end: TtftEnd = TtftEnd.FIRST_TOKEN
    counts_decodes: bool = True
    schedules_ahead: bool = False
    copies_kv: bool = True
    hash_block_tokens: int | None = None
    wait_limit_s: float | None = None
    message_s: float = MESSAGE_S
    prefix_report_s: float | None = None
    output_lengths: LengthsKnown = LengthsKnown.LEARNED
    length_deviation_tokens: float = 50.0
    sends_parts: bool = True
    knows_host_kv: bool = False
    report_s: float = 0.0

    def __post_init__(self) -> None:
        if self.message_s < 0.0:
            raise ValueError(f"message_s is {self.message_s}; it is at least 0")
        if self.report_s < 0.0:
            raise ValueError(f"report_s is {self.report_s}; it is at least 0")
        if self.prefix_report_s is not None and (self.hash_block_tokens is None or self.prefix_report_s < 0.0):
            raise ValueError(f"prefix_report_s is {self.prefix_report_s}; it is at least 0, and needs prefix reuse")
        if self.wait_limit_s is not None and self.wait_limit_s <= 0.0:
            raise ValueError(f"wait_limit_s is {self.wait_limit_s}; it is above 0")
        if self.hash_block_tokens is not None and self.hash_block_tokens < 1:
            raise ValueError(f"a hash names {self.hash_block_tokens} tokens; at least 1 is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLink:
    """The link that KV leaves an engine by; engines share a link of the same name, first come first served.

    Args:
        name: Empty: a link of the engine's own.
        speed: What it does.
    """

    name: str = ""
    speed: LinkSpeed = LINKS["nvlink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """One engine.

    Args:
        engine_id: Unique in the cluster.
        profile: How long its iterations take.
        role: Its role.
        chunk_size_tokens: Chunk size; 0: no new prompts.
        kv_blocks_total: KV blocks.
        kv_bytes_per_token: Bytes of KV cache per token.
        block_size_tokens: Tokens per KV block.
        max_num_seqs: Most running requests.
        max_batch_tokens: Largest chunk size.
        link: What its KV leaves over.
        operators_per_iteration: An iteration of prefills alone may stop where one of so many operators of equal length
            ends (FlowPrefill, section 5.1), if the strategy preempts prefills. 0: it never stops, as on engines.
        learns_latency: Its policy and the routers know at first nothing of how long its iterations take, and learn it
            from them, as in the product. False: they know the profile.
        host_kv_blocks: KV blocks that its host's memory has room for, beside ``kv_blocks_total``; needs prefix reuse
            (``sim.engine.host_cache``). None: it has no such memory.
        host_bytes_per_s: Of the link between host and GPUs, in each direction.
        latency_factor: What they know, unless they learn it, says so many times what iterations take. 1: it is right.

    Raises:
        ValueError: No blocks, a chunk size above ``max_batch_tokens``, fewer than no operators, no latency factor, or
            host memory of fewer than no blocks or without a link.
    """

    engine_id: EngineId
    profile: IterationProfile
    role: Role
    chunk_size_tokens: int
    kv_blocks_total: int
    kv_bytes_per_token: int
    block_size_tokens: int = BLOCK_SIZE_TOKENS
    max_num_seqs: int = MAX_NUM_SEQS
    max_batch_tokens: int = MAX_BATCH_TOKENS
    link: TransferLink = TransferLink()
    operators_per_iteration: int = 0
    learns_latency: bool = False
    latency_factor: float = 1.0
    host_kv_blocks: int | None = None
    host_bytes_per_s: float = HOST_BYTES_PER_S

    def __post_init__(self) -> None:
        if (self.host_kv_blocks is not None and self.host_kv_blocks < 0) or self.host_bytes_per_s <= 0.0:
            raise ValueError(
                f"engine {self.engine_id!r} has {self.host_kv_blocks} KV blocks in its host's memory at "
                f"{self.host_bytes_per_s} bytes/s; at least 0 and above 0 are needed"
            )
        if self.operators_per_iteration < 0:
            raise ValueError(
                f"engine {self.engine_id!r} has {self.operators_per_iteration} operators per iteration; at least 0"
            )
        if self.latency_factor <= 0.0:
            raise ValueError(f"engine {self.engine_id!r} has latency factor {self.latency_factor}; above 0 is needed")
        if self.kv_blocks_total < 1 or self.block_size_tokens < 1 or self.max_num_seqs < 1:
            raise ValueError(
                f"engine {self.engine_id!r} has {self.kv_blocks_total} KV blocks of {self.block_size_tokens} tokens "
                f"for {self.max_num_seqs} requests; at least 1 each is needed"
            )
        if not 0 <= self.chunk_size_tokens <= self.max_batch_tokens:
            raise ValueError(
                f"engine {self.engine_id!r} has chunk size {self.chunk_size_tokens}, not in 0..{self.max_batch_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """One router. Each knows engines from their reports and its own placements only.

    Args:
        arrival_share: Share of the requests that come to it, relative to the others' shares.
        latency_factor: Its latency model says so many times what iterations take. 1: it is right.

    Raises:
        ValueError: Not positive.
    """

    arrival_share: float = 1.0
    latency_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.arrival_share <= 0.0 or self.latency_factor <= 0.0:
            raise ValueError(
                f"a router with share {self.arrival_share} and latency factor {self.latency_factor}; "
                f"both must be positive"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload.

    Args:
        at_s: When it arrives at the router.
        prompt_tokens: Prompt length, at least 1.
        output_tokens: Answer length, at least 1; no policy sees it.
        slo: Its objectives.
        priority: Higher goes first.
        block_hashes: One for each ``SimOptions.hash_block_tokens`` of the prompt, a partial block at its end included.
            It names these tokens and all before them: equal ones mean equal prompts up to there. Empty: unlike any
            other. Those of the answer may follow, so that the next turn of a conversation finds it.
        max_output_tokens: Most output tokens that its client asks for, which a policy may see; 0: it does not say.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    priority: int = 0
    block_hashes: tuple[int, ...] = ()
    max_output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureEvent:
    """Event: an engine gets a role and a chunk size, or drains; in force at its next iteration boundary."""

    at_s: float
    engine_id: EngineId
    role: Role
    chunk_size_tokens: int
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailEvent:
    """Event: an engine dies; what ran there is recomputed elsewhere."""

    at_s: float
    engine_id: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class AddEngineEvent:
    """Event: an engine joins."""

    at_s: float
    setup: EngineSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveEvent:
    """Event: an engine drains, and leaves the cluster as soon as it is empty."""

    at_s: float
    engine_id: EngineId


ClusterEvent = ConfigureEvent | FailEvent | AddEngineEvent | LeaveEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cluster under a strategy: everything but the requests.

    Args:
        engines: The engines at the start.
        strategy: Placement, batching and flow.
        parameters: Of the strategy.
        options: Semantics.
        events: What happens to the cluster.
        seed: Of the policies' random choices.
        routers: The routers, at least one.

    Raises:
        ValueError: No router, or engines that schedule ahead and stop iterations: the next one would be scheduled.
    """

    engines: Sequence[EngineSetup]
    strategy: Strategy
    parameters: StrategyParameters = StrategyParameters()  # noqa: RUF009 - a frozen record
    options: SimOptions = SimOptions()
    events: Sequence[ClusterEvent] = ()
    seed: int = 0
    routers: Sequence[RouterSetup] = (RouterSetup(),)

    def __post_init__(self) -> None:
        if not self.routers:
            raise ValueError("a cell has at least one router")
        if self.options.schedules_ahead:
            for setup in self.engines:
                if setup.operators_per_iteration:
                    raise ValueError(
                        f"engine {setup.engine_id!r} has operators_per_iteration {setup.operators_per_iteration}; "
                        "where engines schedule ahead it is 0"
                    )
