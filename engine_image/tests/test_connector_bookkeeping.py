"""Which tokens are pulled, which blocks stay for a reader, how a resumed request finds its place; no engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_harness
import pytest

BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def nixl() -> Any:
    engine_harness.import_vllm()
    from sluice_engine.kv_transfer import nixl_connector  # noqa: PLC0415 - vLLM takes nine seconds to import

    return nixl_connector


@pytest.fixture(scope="module")
def output_replay() -> Any:
    engine_harness.import_vllm()
    from sluice_engine.kv_transfer import output_replay  # noqa: PLC0415

    return output_replay


@pytest.fixture
def scheduler(nixl: Any) -> Any:
    """The scheduler's half without NIXL: only the records that hand-offs change."""
    half = object.__new__(nixl.SluiceConnectorScheduler)
    half._reqs_not_processed, half._reqs_in_batch = {"a", "b"}, set()
    half._reqs_need_send, half._reqs_need_recv = {"a": 1.0}, {}
    half.block_size = BLOCK_SIZE
    return half


@pytest.mark.parametrize(
    ("params", "num_computed_tokens", "pull"),
    [
        (None, 0, (0, False)),
        ({"sluice_num_tokens": 64}, 0, (0, False)),
        ({"do_remote_prefill": False, "sluice_num_tokens": 64}, 0, (0, False)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 64}, 0, (64, True)),
        # A short tail is computed here; without anything before it, less than a block.
        ({"do_remote_prefill": True, "sluice_num_tokens": 31}, 0, (0, False)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 32}, 0, (32, True)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 64}, 63, (0, False)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 128}, 64, (0, False)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 129}, 64, (65, True)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 64}, 64, (0, False)),
        ({"do_remote_prefill": True, "sluice_num_tokens": 64}, 96, (0, False)),
    ],
)
def test_tokens_beyond_the_prefix_cache_are_pulled(
    params: dict[str, Any] | None, num_computed_tokens: int, pull: tuple[int, bool], scheduler: Any
) -> None:
    request = SimpleNamespace(kv_transfer_params=params)
    assert scheduler.get_num_new_matched_tokens(request, num_computed_tokens) == pull


def test_an_announced_hand_off_is_known_to_the_worker_until_it_is_taken_back(scheduler: Any) -> None:
    scheduler.announce_hand_off("a")
    assert (scheduler._reqs_not_processed, scheduler._reqs_in_batch) == ({"b"}, {"a"})
    scheduler.retract_hand_off("a")
    assert (scheduler._reqs_not_processed, scheduler._reqs_in_batch) == ({"a", "b"}, set())


def test_a_released_lease_that_the_worker_has_not_heard_of_is_never_counted(scheduler: Any) -> None:
    for request_id in ("a", "c"):
        scheduler.announce_hand_off(request_id)
        scheduler.release(request_id)
    assert scheduler._reqs_need_send == {}
    # The worker knows of ``c`` already.
    assert (scheduler._reqs_not_processed, scheduler._reqs_in_batch) == ({"a", "b"}, {"c"})


def test_a_cancelled_pull_reads_nothing_and_tells_the_source(scheduler: Any) -> None:
    request = SimpleNamespace(request_id="r", kv_transfer_params={"do_remote_prefill": True, "remote_host": "h"})
    scheduler.cancel_pull(request)
    assert request.kv_transfer_params == {"do_remote_prefill": False, "remote_host": "h"}
    assert scheduler._reqs_need_recv == {"r": (request, [], (), False)}


def test_a_hand_off_marks_the_request_for_a_reader(nixl: Any) -> None:
    request = SimpleNamespace(kv_transfer_params=None)
    nixl.SluiceConnector.hand_off(object.__new__(nixl.SluiceConnector), request)
    assert request.kv_transfer_params == {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(("tokens", "stats"), [([], "kept"), ([5, 6], None)])
def test_earlier_output_becomes_the_requests_own(tokens: list[int], stats: str | None, output_replay: Any) -> None:
    output: list[int] = []
    request = SimpleNamespace(append_output_token_ids=output.extend, prefill_stats="kept")
    output_replay.restore_output(request, tokens)
    assert (output, request.prefill_stats) == (tokens, stats)


@pytest.mark.parametrize(
    ("tokens", "fits", "is_refused", "asked"),
    [([], False, False, []), ([5, 6], True, False, [("r", [5, 6])]), ([5, 6], False, True, [("r", [5, 6])])],
)
def test_a_grammar_is_brought_to_where_the_output_is(
    tokens: list[int], *, fits: bool, is_refused: bool, asked: list[tuple[str, list[int]]], output_replay: Any
) -> None:
    calls: list[tuple[str, list[int]]] = []

    def accept_tokens(request_id: str, accepted: list[int]) -> bool:
        calls.append((request_id, accepted))
        return fits

    grammar = SimpleNamespace(grammar=SimpleNamespace(accept_tokens=accept_tokens))
    request = SimpleNamespace(request_id="r", output_token_ids=tokens, structured_output_request=grammar)
    if is_refused:
        with pytest.raises(output_replay.GrammarReplayError, match="its 2 earlier tokens do not fit"):
            output_replay.replay_grammar(request)
    else:
        output_replay.replay_grammar(request)
    assert calls == asked


def test_a_seeded_generator_goes_on_where_its_output_ends(output_replay: Any) -> None:
    import torch  # noqa: PLC0415

    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))

    state: Any = SimpleNamespace(output_token_ids=[])
    generator = output_replay.ReplayGenerator(7, state)
    drawn = [draw(generator) for _ in range(4)]
    assert len(set(drawn)) == 4
    for num_tokens in (0, 2, 3):
        state.output_token_ids = [1] * num_tokens
        generator.set_offset(generator.get_offset())
        assert draw(generator) == drawn[num_tokens]
        assert draw(output_replay.ReplayGenerator(7, state)) == drawn[num_tokens]
    assert draw(output_replay.ReplayGenerator(8, state)) != drawn[3]
