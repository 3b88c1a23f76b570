"""Starts the EngineCore, as ``vllm_config`` says."""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from sluice_engine import core_refusal
from sluice_engine.child_processes import die_with_parent
from sluice_engine.errors import ModelRefusedError, StartError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from sluice_engine.settings import EngineSettings


def check_ports(settings: EngineSettings) -> None:
    """Makes sure that the ports are free; a taken side-channel port hangs NIXL's start for ever.

    Raises:
        StartError: Names the port.
    """
    ports = {"--port": (settings.host, settings.port), "--metrics-port": (settings.host, settings.metrics_port)}
    ports["--kv-port"] = (settings.kv_host, settings.kv_port)
    for option, address in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise StartError(f"{option}: cannot listen on {address[0]}:{address[1]}: {error.strerror}") from error


def become_core() -> None:
    """Makes a fork of this process one that is ended by its parent alone.

    The scheduler calls ``die_with_parent`` too, but seconds later: a parent that is killed meanwhile would leave it
    behind. In a process group of its own it does not get the terminal's Ctrl-C, on which the parent drains first.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()
    os.setpgid(0, 0)


def start_core(config: VllmConfig) -> Any:
    """Starts the EngineCore and waits until it is ready.

    Returns:
        vLLM's ``AsyncMPClient``.

    Raises:
        ModelRefusedError: It refuses the model.
        StartError: It did not become ready.
    """
    os.register_at_fork(after_in_child=become_core)
    try:
        return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)
    except (RuntimeError, TimeoutError, OSError) as error:
        if reason := core_refusal.read():
            raise ModelRefusedError(reason) from error
        raise StartError(f"the EngineCore did not start: {error}") from error


def load_tokenizer(config: VllmConfig) -> Any:
    """The model's tokenizer, which grammars and bad words need; None for an emulated engine."""
    if config.model_config.skip_tokenizer_init:
        return None
    return cached_tokenizer_from_config(config.model_config)
