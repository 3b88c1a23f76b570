"""An executor with which vLLM schedules ahead on the CPU: the model runs in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sluice_engine.startup.in_process_executor import InProcessExecutor


class AsyncExecutor(InProcessExecutor):
    """vLLM turns asynchronous scheduling off for CPUs; here it is on again once the worker exists."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.vllm_config.scheduler_config.async_scheduling = True

    def collective_rpc(
        self,
        method: Any,
        timeout: Any = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,  # noqa: FBT001, FBT002
        single_value: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        run = super().collective_rpc
        if not hasattr(self, "_pool"):
            return run(method, timeout, args, kwargs, non_block, single_value)
        future = self._pool.submit(run, method, timeout, args, kwargs, False, single_value)  # noqa: FBT003
        return future if non_block and method in ("execute_model", "sample_tokens") else future.result()
