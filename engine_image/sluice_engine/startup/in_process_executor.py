"""The CPU executor: runs vLLM's worker inside the EngineCore process.

vLLM gives a CPU engine's worker a process of its own. In the EngineCore process it saves 300 MiB and a second of
start-up, and lets one process be forked into any number of engines.
"""

from __future__ import annotations

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from sluice_engine.startup.gloo_device import share_gloo_device


# A class of its own is needed: on CPUs vLLM rewrites the executor name "uni" to "mp".
class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the model inside the EngineCore process."""

    def _init_executor(self) -> None:
        # vLLM compiles a part of the sampler on its own account. That takes each engine 3 s of CPU, 28 s the first time
        # on a machine, and a C++ compiler; a model on the CPU gains nothing by it.
        torch.compiler.set_stance("force_eager")
        share_gloo_device()
        super()._init_executor()
