"""Makes NIXL's progress thread pause between polls.

nixl 1.5.1 hard-codes a pause of 0, which burns most of a core per engine while nothing moves. 100 microseconds cost the
hand-off nothing over TCP; with RDMA they would be a good part of a small read, so that the pause is a setting.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

# Key of kv_connector_extra_config: pause of NIXL's progress thread, in microseconds; 0 with RDMA.
DELAY_KEY = "sluice_progress_delay_us"
DEFAULT_DELAY_US = 100


class UnsupportedNixlError(RuntimeError):
    """NIXL's bindings are not those that the hook is written against."""


def load_bindings() -> Any:
    """Loads NIXL's bindings the way vLLM does.

    Returns:
        The module whose ``nixlAgent`` makes agents.

    Raises:
        UnsupportedNixlError: NIXL is missing, or has no ``pthrDelay``.
    """
    from vllm.distributed import nixl_utils  # noqa: PLC0415  (imports UCX; workers only)

    if nixl_utils.NixlWrapper is None:
        raise UnsupportedNixlError("NIXL is not installed")
    bindings = importlib.import_module(nixl_utils.NixlWrapper.__module__).nixlBind
    if not hasattr(bindings, "nixlAgent") or not hasattr(bindings.nixlAgentConfig(), "pthrDelay"):
        raise UnsupportedNixlError("NIXL's bindings have changed: nixlAgent or nixlAgentConfig.pthrDelay is missing")
    return bindings


def set_progress_delay(delay_us: int) -> None:
    """Makes agents created from now on pause between polls.

    Args:
        delay_us: Pause, in microseconds; 0 polls without a pause.
    """
    bindings = load_bindings()
    make_agent = getattr(bindings.nixlAgent, "__wrapped__", bindings.nixlAgent)

    @functools.wraps(make_agent)
    def make_paced_agent(name: str, settings: Any) -> Any:
        settings.pthrDelay = delay_us
        return make_agent(name, settings)

    bindings.nixlAgent = make_paced_agent
