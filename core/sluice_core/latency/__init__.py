"""How long an iteration, a prefill and a KV transfer take.

``interface`` says what a latency model answers. ``online_latency_model`` fits one to the iterations that an engine
measures; ``iteration_time`` has its terms as a table, which ``measured_profiles`` builds for a model
(``known_models``) on a GPU (``known_gpus``). ``prefill_time`` has the closed form of prefills,
``kv_capacity`` says what fits into its memory, ``transfer`` knows links.
"""

from sluice_core.latency.interface import LatencyModel
from sluice_core.latency.iteration_time import IterationProfile, ModelOnGpu
from sluice_core.latency.online_latency_model import LinearCoefficients, OnlineLatencyModel
from sluice_core.latency.prefill_time import PrefillCoefficients, compute_attention_work, compute_prefill_s
from sluice_core.latency.transfer import (
    DEFAULT_TRANSFER_BYTES_PER_S,
    LINKS,
    TRANSFER_LATENCY_S,
    LinkSpeed,
    estimate_transfer_s,
    find_link,
)

__all__ = [
    "DEFAULT_TRANSFER_BYTES_PER_S",
    "LINKS",
    "TRANSFER_LATENCY_S",
    "IterationProfile",
    "LatencyModel",
    "LinearCoefficients",
    "LinkSpeed",
    "ModelOnGpu",
    "OnlineLatencyModel",
    "PrefillCoefficients",
    "compute_attention_work",
    "compute_prefill_s",
    "estimate_transfer_s",
    "find_link",
]
