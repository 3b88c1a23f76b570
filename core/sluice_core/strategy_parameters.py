"""What a plan may set of a strategy: the values, their defaults, and their bounds as rows.

The rows are the one source for the manifest's bounds, the wire's checks and the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
        catch_up_tokens: Tokens of an answer until which it may be behind its TPOT SLO, as far as it catches up by then;
            manifests cannot set it.
        late_ttft_factor: A prompt that cannot meet its TTFT SLO waits as if this were so many times as long; 1: it
            keeps its place.
        late_share: Share of the prefill time that such prompts get together while others can meet theirs; 1: by their
            deadlines, whoever else becomes late.
        overload_order: See ``OverloadOrder``.
        pack_share: Share of the TPOT SLO up to which decodes gather on one engine; 0: they stay where they begin.
        pack_prompt_share: Time of the usual prompt, as a share of the TPOT SLO, from which on they gather;
            manifests cannot set it.
        credit_s: Prefill work, in seconds, that an engine is given ahead; 0: all of it, as it arrives.
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
    catch_up_tokens: int = 8
    late_ttft_factor: float = 3.0
    late_share: float = 0.1
    overload_order: OverloadOrder = OverloadOrder.LONGEST_LAST
    pack_share: float = 0.85
    pack_prompt_share: float = 4.0
    credit_s: float = 0.1
    macro_instance_least: int = 4
    macro_instance_most: int = 16
    split_search_steps: int = 6
    split_margin_tokens: int = 20
    tbt_target_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One live parameter, a whole number or a word.

    Args:
        name: On the wire; the manifest writes it in camel case.
        low: Least number.
        high: Largest number.
        choices: The words; empty: it is a number.
        unit: Of the number.
        source: Paper and section of the default; empty: it is ours.
    """

    name: str
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()
    unit: str = ""
    source: str = ""

    def check(self, value: str) -> None:
        """Check a value as on the wire.

        Raises:
            ValueError: Names the parameter, the value and the limit.
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"parameters.{self.name} is {value!r}, known are {', '.join(self.choices)}")
        elif not (value.isascii() and value.isdigit() and self.low <= int(value) <= self.high):
            raise ValueError(f"parameters.{self.name} is {value}, allowed are {self.low} to {self.high}")


WATERMARK = Parameter(name="watermark_percent", low=50, high=99, unit="percent", source="TaiChi, section 3.3")
APPROACHING_FACTOR = Parameter(
    name="approaching_factor_percent", low=50, high=100, unit="percent", source="TaiChi, section 4.1"
)
EARLY_REJECTION = Parameter(name="early_rejection", choices=tuple(EarlyRejection))
MIN_TOKENS_BETWEEN_MOVES = Parameter(name="min_tokens_between_moves", low=0, high=65_536, unit="tokens")
PREFILL_BATCH_TOKENS = Parameter(
    name="prefill_batch_tokens",
    low=0,
    high=1_048_576,
    unit="tokens",
    source="DistServe, section 4.3: L_m; the value: FlowPrefill, section 6.1",
)
BATCH_TOKEN_BUDGET = Parameter(
    name="batch_token_budget",
    low=16,
    high=1_048_576,
    unit="tokens",
    source="FlowPrefill, section 6.3",
)
# Engines keep handed-off KV for 30 s at most, and a pull may take 2 s to begin.
GRANT_WAIT_MILLISECONDS = Parameter(name="grant_wait_milliseconds", low=1, high=25_000, unit="milliseconds")
TPOT_SHARE = Parameter(name="tpot_share_percent", low=50, high=100, unit="percent")
LEAST_PREFILL = Parameter(name="least_prefill_percent", low=0, high=100, unit="percent")
LATE_TTFT_FACTOR = Parameter(name="late_ttft_factor_percent", low=100, high=400, unit="percent")
LATE_SHARE = Parameter(name="late_share_percent", low=0, high=100, unit="percent")
OVERLOAD_ORDER = Parameter(
    name="overload_order",
    choices=tuple(OverloadOrder),
    source="Moore, Management Science 15(1), 1968",
)
PACK_SHARE = Parameter(name="pack_share_percent", low=0, high=100, unit="percent")
CREDIT = Parameter(name="credit_milliseconds", low=0, high=10_000, unit="milliseconds")
MACRO_INSTANCE_LEAST = Parameter(
    name="macro_instance_least", low=1, high=256, unit="engines", source="EcoServe, section 4.3.2: N_l"
)
MACRO_INSTANCE_MOST = Parameter(
    name="macro_instance_most", low=1, high=1024, unit="engines", source="EcoServe, section 4.3.2: N_u"
)
SPLIT_SEARCH_STEPS = Parameter(
    name="split_search_steps", low=1, high=16, unit="steps", source="DynaServe, section 4.1: K"
)
SPLIT_MARGIN_TOKENS = Parameter(
    name="split_margin_tokens", low=0, high=65_536, unit="tokens", source="DynaServe, section 5"
)
TBT_TARGET_MILLISECONDS = Parameter(name="tbt_target_milliseconds", low=0, high=60_000, unit="milliseconds")
PARAMETERS = (
    WATERMARK,
    APPROACHING_FACTOR,
    EARLY_REJECTION,
    MIN_TOKENS_BETWEEN_MOVES,
    PREFILL_BATCH_TOKENS,
    BATCH_TOKEN_BUDGET,
    GRANT_WAIT_MILLISECONDS,
    TPOT_SHARE,
    LEAST_PREFILL,
    LATE_TTFT_FACTOR,
    LATE_SHARE,
    OVERLOAD_ORDER,
    PACK_SHARE,
    CREDIT,
    MACRO_INSTANCE_LEAST,
    MACRO_INSTANCE_MOST,
    SPLIT_SEARCH_STEPS,
    SPLIT_MARGIN_TOKENS,
    TBT_TARGET_MILLISECONDS,
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
    read = format_parameters(PARAMETERS, StrategyParameters())
    for row in rows:
        read[row.name] = values.get(row.name, read[row.name])
        row.check(read[row.name])
    return StrategyParameters(
        watermark=int(read[WATERMARK.name]) / 100,
        approaching_factor=int(read[APPROACHING_FACTOR.name]) / 100,
        early_rejection=EarlyRejection(read[EARLY_REJECTION.name]),
        min_tokens_between_moves=int(read[MIN_TOKENS_BETWEEN_MOVES.name]),
        prefill_batch_tokens=int(read[PREFILL_BATCH_TOKENS.name]),
        batch_token_budget=int(read[BATCH_TOKEN_BUDGET.name]),
        grant_wait_s=int(read[GRANT_WAIT_MILLISECONDS.name]) / 1e3,
        tpot_share=int(read[TPOT_SHARE.name]) / 100,
        least_prefill_share=int(read[LEAST_PREFILL.name]) / 100,
        late_ttft_factor=int(read[LATE_TTFT_FACTOR.name]) / 100,
        late_share=int(read[LATE_SHARE.name]) / 100,
        overload_order=OverloadOrder(read[OVERLOAD_ORDER.name]),
        pack_share=int(read[PACK_SHARE.name]) / 100,
        credit_s=int(read[CREDIT.name]) / 1000,
        macro_instance_least=int(read[MACRO_INSTANCE_LEAST.name]),
        macro_instance_most=int(read[MACRO_INSTANCE_MOST.name]),
        split_search_steps=int(read[SPLIT_SEARCH_STEPS.name]),
        split_margin_tokens=int(read[SPLIT_MARGIN_TOKENS.name]),
        tbt_target_s=int(read[TBT_TARGET_MILLISECONDS.name]) / 1000,
    )


def format_parameters(rows: tuple[Parameter, ...], parameters: StrategyParameters) -> dict[str, str]:
    """Write parameters as on the wire, by name.

    Args:
        rows: Those that are written.
        parameters: Their values.
    """
    values = {
        WATERMARK.name: str(round(parameters.watermark * 100)),
        APPROACHING_FACTOR.name: str(round(parameters.approaching_factor * 100)),
        EARLY_REJECTION.name: str(parameters.early_rejection.value),
        MIN_TOKENS_BETWEEN_MOVES.name: str(parameters.min_tokens_between_moves),
        PREFILL_BATCH_TOKENS.name: str(parameters.prefill_batch_tokens),
        BATCH_TOKEN_BUDGET.name: str(parameters.batch_token_budget),
        GRANT_WAIT_MILLISECONDS.name: str(round(parameters.grant_wait_s * 1e3)),
        TPOT_SHARE.name: str(round(parameters.tpot_share * 100)),
        LEAST_PREFILL.name: str(round(parameters.least_prefill_share * 100)),
        LATE_TTFT_FACTOR.name: str(round(parameters.late_ttft_factor * 100)),
        LATE_SHARE.name: str(round(parameters.late_share * 100)),
        OVERLOAD_ORDER.name: str(parameters.overload_order.value),
        PACK_SHARE.name: str(round(parameters.pack_share * 100)),
        CREDIT.name: str(round(parameters.credit_s * 1000)),
        MACRO_INSTANCE_LEAST.name: str(parameters.macro_instance_least),
        MACRO_INSTANCE_MOST.name: str(parameters.macro_instance_most),
        SPLIT_SEARCH_STEPS.name: str(parameters.split_search_steps),
        SPLIT_MARGIN_TOKENS.name: str(parameters.split_margin_tokens),
        TBT_TARGET_MILLISECONDS.name: str(round(parameters.tbt_target_s * 1000)),
    }
    return {row.name: values[row.name] for row in rows}
