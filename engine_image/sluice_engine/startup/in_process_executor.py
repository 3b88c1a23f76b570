"""The CPU executor: runs vLLM's worker inside the EngineCore process.

vLLM gives a CPU engine's worker a process of its own. Running it in the EngineCore process saves 300 MiB and a second of
start-up, and lets one process be forked into any number of engines.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


# A class of its own is needed: on CPUs vLLM rewrites the executor name "uni" to "mp".
class InProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs the model inside the EngineCore process."""
