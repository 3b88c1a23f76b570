"""Which of two candidates wins: at a rate the one of fewer GPUs that serves it, otherwise the one of higher goodput."""

from __future__ import annotations

from sluice_core.planning.slider_search import CandidateSearchResult


def rank_for_rate(found: CandidateSearchResult, rate_rps: float | None) -> tuple[bool, float, float]:
    """Order what searches found, the best first: those that serve the rate by GPUs, the others by goodput.

    Args:
        found: What a search found.
        rate_rps: Rate to serve; None: as high a one as can be, so that all are ordered by goodput.
    """
    goodput_rps = found.best.goodput_rps
    serves = rate_rps is not None and goodput_rps >= rate_rps
    return not serves, found.best.candidate.num_gpus if serves else -goodput_rps, -goodput_rps
