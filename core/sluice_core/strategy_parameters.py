"""What a plan may set of a strategy: the values with their defaults, and what a row says of one of them.

Each strategy's file has the rows of its own. They are the one source of the manifest's bounds, the wire's checks and
the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class EarlyRejection(StrEnum):
    """What happens to a request that no engine can serve within its TTFT SLO."""

    OFF = "Off"
    RANDOM = "Random"
    REJECT = "Reject"


class OverloadOrder(StrEnum):
    """Which prompts wait behind the others when not all can meet their TTFT SLO."""

    LONGEST_LAST = "LongestLast"
    DEADLINE = "Deadline"


class PrefillOrder(StrEnum):
    """In which order FlowPrefill serves prompts; all but the first are what it is compared with (section 6.3).

    ``formula_3`` is the paper's formula to the letter: of prompts that will be late the latest deadline goes first.
    ``d_edf`` serves those last whose deadline has passed, ``edf`` and ``chunked_edf`` serve by deadline alone. The last
    fills each iteration by deadline, whatever has started.
    """

    S_EDF = "s_edf"
    FORMULA_3 = "formula_3"
    D_EDF = "d_edf"
    EDF = "edf"
    CHUNKED_EDF = "chunked_edf"


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyParameters:
    """Live parameters of the strategies. Defaults: TaiChi, sections 3.3 and 4.1; bounds: the CRD.

    Args:
        watermark: M, share of KV blocks or of max_num_seqs.
        approaching_factor: Alpha, share of the TPOT SLO.
        early_rejection: Policy for infeasible requests.
        min_tokens_between_moves: Output tokens between two moves of a request unless its SLO is at stake.
        prefill_batch_tokens: L_m, prefill tokens that saturate a GPU: a prefill engine batches whole prompts up to so
            many, and a longer one alone. 0: it fills its chunk (DistServe, section 4.3).
        batch_token_budget: G (FlowPrefill, section 5.2, Algorithm 1): prompt tokens that a batch stays below.
        prefill_order: See ``PrefillOrder``; manifests cannot set it.
        grant_wait_s: Longest time that a finished prefill waits for a decode engine, its KV on the prefill engine; then
            it is recomputed and decodes in place. Below the lease of handed-off KV.
        tpot_share: Share of the TPOT SLO that prefills may use up.
        least_prefill_share: Share of the TPOT SLO that prefills get in each iteration beside decodes in any case.
        decode_share: Share of the TPOT SLO that an engine's decodes take, with no more prefills than needed. More
            requests wait at the router: they miss their own TTFT SLO alone. 0: as many as the engine takes; manifests
            cannot set it.
        pace_share: Share of the time to its TTFT SLO that a prompt's prefill may take where decodes have nothing to
            spare; 0: prefills take what they are given. Manifests cannot set it.
        alone_tokens: Prefill tokens of an iteration without decodes, of an engine that sizes its iterations; 0: as many
            as it can run. Manifests cannot set it.
        late_ttft_factor: A prompt that cannot meet its TTFT SLO waits as if this were so many times as long; 1: it
            keeps its place.
        late_share: Share of the prefill time that such prompts get together while others can meet theirs; 1: by their
            deadlines, whoever else becomes late.
        late_reserve_share: Share of an engine's seats and KV blocks that such prompts leave free for others; manifests
            cannot set it.
        urgent_reserve_share: The same, that prompts leave free for those of shorter TTFT SLOs; manifests cannot set it.
        overload_order: See ``OverloadOrder``.
        pack_share: Share of the TPOT SLO up to which decodes gather on one engine; 0: they stay where they begin.
        pack_prompt_share: Time of the usual prompt, as a share of the TPOT SLO, from which on they gather;
            manifests cannot set it.
        credit_s: Prefill work, in seconds, that an engine is given ahead; 0: all of it, as it arrives.
        shared_credit_share: Share of a prompt's TTFT SLO that counts instead where it is longer, of engines that
            several routers share; manifests cannot set it.
        selects_by_slack: Engines compute their prompts by deadline too, those last that will be late, and not as they
            came; manifests cannot set it.
        macro_instance_least: N_l, engines of the macro instance that a split makes (EcoServe, section 3.5.1).
        macro_instance_most: N_u, most engines of one; it counts as ``2 * N_l - 1`` where it is less.
        split_search_steps: K, most steps of the search for a split (DynaServe, section 4.1, Algorithm 1).
        split_margin_tokens: Tokens that a predicted output is taken to be longer (DynaServe, section 5).
        tbt_target_s: S, what an iteration with decodes may take (DynaServe, section 4.2, Algorithm 2); 0: the least
            TPOT objective of the decodes.
    """

    watermark: float = 0.95
    approaching_factor: float = 0.96
    early_rejection: EarlyRejection = EarlyRejection.OFF
    min_tokens_between_moves: int = 16
    prefill_batch_tokens: int = 2048
    batch_token_budget: int = 4096
    prefill_order: PrefillOrder = PrefillOrder.S_EDF
    grant_wait_s: float = 10.0
    tpot_share: float = 0.98
    least_prefill_share: float = 0.1
    decode_share: float = 0.99
    pace_share: float = 0.8
    alone_tokens: int = 2048
    late_ttft_factor: float = 3.0
    late_share: float = 0.0
    late_reserve_share: float = 0.25
    urgent_reserve_share: float = 0.1
    overload_order: OverloadOrder = OverloadOrder.LONGEST_LAST
    pack_share: float = 0.85
    pack_prompt_share: float = 4.0
    credit_s: float = 0.1
    shared_credit_share: float = 0.3
    selects_by_slack: bool = True
    macro_instance_least: int = 4
    macro_instance_most: int = 16
    split_search_steps: int = 6
    split_margin_tokens: int = 20
    tbt_target_s: float = 0.0


# Numbers on the wire are whole: so many of them are one of a parameter's value.
_PER_UNIT = {"percent": 100, "milliseconds": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One live parameter, a whole number or a word.

    Args:
        name: On the wire; the manifest writes it in camel case.
        field: Of ``StrategyParameters``.
        low: Least number.
        high: Largest number.
        words: What it may be; None: it is a number.
        unit: Of the number.
        source: Paper and section of the default; empty: it is ours.
    """

    name: str
    field: str
    low: int = 0
    high: int = 0
    words: type[StrEnum] | None = None
    unit: str = ""
    source: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words; empty: it is a number."""
        return () if self.words is None else tuple(word.value for word in self.words)

    def read(self, value: str) -> Any:
        """Read a value as on the wire.

        Raises:
            ValueError: Names the parameter, the value and the limit.
        """
        if self.words is not None:
            if value not in self.choices:
                raise ValueError(f"parameters.{self.name} is {value!r}, known are {', '.join(self.choices)}")
            return self.words(value)
        if not (value.isascii() and value.isdigit() and self.low <= int(value) <= self.high):
            raise ValueError(f"parameters.{self.name} is {value}, allowed are {self.low} to {self.high}")
        return int(value) / _PER_UNIT[self.unit] if self.unit in _PER_UNIT else int(value)

    def format(self, parameters: StrategyParameters) -> str:
        """Write a value as on the wire."""
        value = getattr(parameters, self.field)
        return str(value.value) if self.words is not None else str(round(value * _PER_UNIT.get(self.unit, 1)))


# Every strategy has these.
EARLY_REJECTION = Parameter(name="early_rejection", field="early_rejection", words=EarlyRejection)
WATERMARK = Parameter(
    name="watermark_percent", field="watermark", low=50, high=99, unit="percent", source="TaiChi, section 3.3"
)


def read_parameters(rows: tuple[Parameter, ...], values: Mapping[str, str], strategy: str) -> StrategyParameters:
    """Check and read parameters; what is missing has its default.

    Args:
        rows: What there is.
        values: As on the wire, by name.
        strategy: Whose they are, for messages.

    Raises:
        ValueError: An unknown name, or a value out of bounds.
    """
    known = {row.name: row for row in rows}
    for name in sorted(values):
        if name not in known:
            raise ValueError(f"parameters.{name} is unknown to strategy {strategy!r}; known are {', '.join(known)}")
    read = {known[name].field: known[name].read(value) for name, value in values.items()}
    return replace(StrategyParameters(), **read)


def format_parameters(rows: tuple[Parameter, ...], parameters: StrategyParameters) -> dict[str, str]:
    """Write parameters as on the wire, by name.

    Args:
        rows: Those that are written.
        parameters: Their values.
    """
    return {row.name: row.format(parameters) for row in rows}
