"""Engines that tests share. A test that leaves blocks used or requests running fails in its own teardown."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_harness as harness
import pytest
from engine_ports import PORTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_harness import Engine


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The tiny model's directory, made when it is not there."""
    from examples.tiny_model import make_tiny_model  # noqa: PLC0415  (numpy and tokenizers, for engines only)

    directory = Path(__file__).parents[2] / ".sluice/volumes/models/tiny"
    make_tiny_model(directory)
    return directory


@pytest.fixture(scope="session")
def start_engine(tiny_model: Path) -> Iterator[Callable[..., Engine]]:
    """Starts engines that live until the session ends, or until they are closed."""
    harness.import_vllm()
    engines: list[Engine] = []

    def start(name: str, **options: Any) -> Engine:
        engine = harness.Engine(name, tiny_model, next(PORTS), **options)
        engines.append(engine)
        return engine

    yield start
    with ThreadPoolExecutor() as threads:
        list(threads.map(harness.Engine.close, engines))


@pytest.fixture(scope="session")
def shared_pair(start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    """Two engines with plenty of KV."""
    return start_engine("a"), start_engine("b")


@pytest.fixture(scope="session")
def shared_small_pair(start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    """Two engines with 40 blocks of KV each, one of which vLLM keeps."""
    return tuple(start_engine(name, num_gpu_blocks_override=40, max_model_len=1024) for name in ("small-a", "small-b"))


@pytest.fixture(scope="session")
def shared_async_pair(start_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    """Two engines that schedule ahead."""
    return tuple(start_engine(name, is_async=True) for name in ("async-a", "async-b"))


def _hand_out(engines: tuple[Engine, ...]) -> Iterator[tuple[Engine, ...]]:
    for engine in engines:
        engine.configure(harness.MAX_BATCH_TOKENS)
        engine.client.reset_prefix_cache()
        engine.parts.clear()
        engine.reports.clear()
        engine.refused.clear()
    yield engines
    for engine in engines:
        engine.abort(*(part for part in engine.parts.values() if not part.is_over))
        harness.wait([engine], engine.is_idle, 10)


@pytest.fixture
def pair(shared_pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    yield from _hand_out(shared_pair)


@pytest.fixture
def small_pair(shared_small_pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    yield from _hand_out(shared_small_pair)


@pytest.fixture
def async_pair(shared_async_pair: tuple[Engine, Engine]) -> Iterator[tuple[Engine, Engine]]:
    yield from _hand_out(shared_async_pair)
