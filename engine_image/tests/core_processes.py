"""Processes for tests, forked from a server that has imported vLLM and has no threads: EngineCores and whole engines.

A child forked from the test process itself may hang or crash: a thread that it does not have may have held a lock.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.process import BaseProcess

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "sluice_engine.plugin", "sluice_engine.lifecycle"]
)


def run_core(
    target: Callable[..., None], environment: Mapping[str, str], replaced: Mapping[str, Any], kwargs: dict[str, Any]
) -> None:
    """Runs an EngineCore in this process, with environment variables and replaced attributes of modules."""
    os.environ.update(environment)
    for path, value in replaced.items():
        module, _, attribute = path.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    target(**kwargs)


def run_program(module: str, arguments: list[str], environment: Mapping[str, str], log: str) -> None:
    """Runs a module as a program in this process, as the launcher's fork server does."""
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class CoreContext:
    """What vLLM takes for a multiprocessing context when it starts an EngineCore.

    Attributes:
        replaced: Values of module attributes in the core, by their full names.
    """

    replaced: Mapping[str, Any]

    def Process(self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]) -> BaseProcess:  # noqa: N802
        """A process of the server, in this one's environment of now."""
        return SERVER.Process(target=run_core, name=name, args=(target, dict(os.environ), self.replaced, kwargs))
