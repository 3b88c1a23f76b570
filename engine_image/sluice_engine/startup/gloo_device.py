"""One network device, and so one polling thread, for all of an engine's gloo process groups.

vLLM makes a dozen groups. torch gives each a device of its own, whose thread wakes up every 10 ms: an idle engine on
the CPU spends up to 3 % of a core on them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store


@cache
def _get_device() -> Any:
    return ProcessGroupGloo.create_default_device()


class SharedDeviceGloo(ProcessGroupGloo):  # type: ignore[misc]
    """A gloo process group on the device of this process."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        # torch's C++ class has no public name for them.
        options = ProcessGroupGloo._Options()  # noqa: SLF001
        options._devices = [_get_device()]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """Has torch make all further gloo process groups of this process on one device."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
