"""Event loops of the router's tests, and what the tests of its edges share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop
from edge_fakes import ANSWER, FakePlane, say, write_model

from sluice_router.text.tokenizer import ModelText

if TYPE_CHECKING:
    from collections.abc import Iterator

# The router runs on uvloop; connections behave differently enough on asyncio's own loop to be tested on both.
BOTH_LOOPS = ("test_http_connections", "test_http_slow_readers")


def pytest_asyncio_loop_factories(config, item):
    """Chooses the event loops of a test."""
    if item.module.__name__ in BOTH_LOOPS:
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelText]:
    """The text side of a small model."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    model = ModelText.load(directory)
    yield model
    model.close()


@pytest.fixture
async def plane(text: ModelText) -> FakePlane:
    """A data plane that gives every request the same answer."""
    return FakePlane(say(text, ANSWER))
