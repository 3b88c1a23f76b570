"""Which candidates a search tries: some all over the space, and those a step away from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sluice_core.planning.slider_candidates import SearchSpace, SliderCandidate
from sluice_core.strategies import get_strategy

_COARSE_CHUNKS = ((256, 64), (512, 128), (1024, 128), (1024, 256), (2048, 128), (2048, 512), (8192, 256))
# D-heavy engines have as few prefills as the bounds allow (FlowPrefill, section 6.1).
_COARSE_FLOWPREFILL = ((512, 0), (2048, 0))
_COARSE_AGGREGATED = (128, 256, 512, 1024, 2048)
_COARSE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


def list_coarse(space: SearchSpace, replicas: int, tensor_parallel: int) -> list[SliderCandidate]:
    """List candidates all over the space, few enough to try each."""
    counts = space.prefill_heavy.resolve(replicas)
    spread: list[int] = []
    if counts is not None:
        low, high = counts
        spread = sorted({min(max(round(share * replicas), low), high) for share in _COARSE_SHARES})
    found = [
        space.make_candidate(
            strategy,
            replicas,
            tensor_parallel,
            num_prefill_heavy=count,
            prefill_heavy_tokens=prefill,
            decode_heavy_tokens=decode,
        )
        for strategy, chunks in (("taichi", _COARSE_CHUNKS), ("flowprefill", _COARSE_FLOWPREFILL))
        for count in spread
        for prefill, decode in chunks
    ]
    found += [
        space.make_candidate("aggregated", replicas, tensor_parallel, prefill_heavy_tokens=tokens)
        for tokens in _COARSE_AGGREGATED
    ]
    found += [
        space.make_candidate(strategy, replicas, tensor_parallel) for strategy in ("dynaserve", "ecoserve", "sluice")
    ]
    found += [
        space.make_candidate("disaggregated", replicas, tensor_parallel, num_prefill_heavy=count) for count in spread
    ]
    return [candidate for candidate in dict.fromkeys(found) if space.contains(candidate)]


# Steps on the lattice: P-heavy engines, their chunk size, that of the others.
_STEPS = ((1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1), (1, 0, 1), (-1, 0, -1))


def list_neighbours(space: SearchSpace, candidate: SliderCandidate, count_step: int = 1) -> list[SliderCandidate]:
    """List the candidates around one, M and alpha aside.

    Args:
        space: The bounds.
        candidate: The one.
        count_step: How many P-heavy engines are a step.
    """
    found: dict[SliderCandidate, None] = {}
    for by_count, by_prefill, by_decode in _STEPS:
        moved = _step(space, candidate, by_count * count_step, by_prefill, by_decode)
        if moved is not None and moved != candidate and space.contains(moved):
            found[moved] = None
    return list(found)


def list_smaller(space: SearchSpace, candidate: SliderCandidate, *, of_prefill_heavy: bool) -> list[SliderCandidate]:
    """List the candidates with ever smaller chunks of the P-heavy engines, or of the others."""
    found: list[SliderCandidate] = []
    by_prefill, by_decode = (-1, 0) if of_prefill_heavy else (0, -1)
    moved = _step(space, candidate, 0, by_prefill, by_decode)
    while moved is not None and space.contains(moved):
        found.append(moved)
        moved = _step(space, moved, 0, by_prefill, by_decode)
    return found


def _step(
    space: SearchSpace, candidate: SliderCandidate, by_count: int, by_prefill: int, by_decode: int
) -> SliderCandidate | None:
    """Take a step that the strategy has; None at the end of the lattice."""
    sliders = get_strategy(candidate.strategy).sliders
    if (
        (by_count and not sliders.varies_ratio)
        or (by_prefill and not sliders.varies_prefill_tokens)
        or (by_decode and not sliders.varies_decode_tokens)
    ):
        return None
    prefill = _walk(space.prefill_heavy_tokens, candidate.prefill_heavy_tokens, by_prefill)
    decode = _walk(space.decode_heavy_tokens, candidate.decode_heavy_tokens, by_decode)
    if prefill is None or decode is None:
        return None
    return replace(
        candidate,
        num_prefill_heavy=candidate.num_prefill_heavy + by_count,
        num_decode_heavy=candidate.num_decode_heavy - by_count,
        prefill_heavy_tokens=prefill,
        decode_heavy_tokens=decode,
    )


def list_parameter_neighbours(space: SearchSpace, candidate: SliderCandidate) -> list[SliderCandidate]:
    """List the candidates that differ in M or alpha alone; both work where decodes flow."""
    if candidate.strategy != "taichi":
        return []
    found = [replace(candidate, watermark=value) for value in space.watermarks]
    found += [replace(candidate, approaching_factor=value) for value in space.approaching_factors]
    return [moved for moved in dict.fromkeys(found) if moved != candidate]


def _walk(values: Sequence[int], value: int, by: int) -> int | None:
    if by == 0:
        return value
    if value not in values:
        return None
    position = values.index(value) + by
    return values[position] if 0 <= position < len(values) else None
