"""A request that moves while it decodes ends with the very tokens and logprobs of one that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engine_harness import BLOCK_SIZE, MAX_BATCH_TOKENS, make_prompt, move, run_alone, run_moving, wait

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine

# Prompts around block and chunk boundaries; cuts around block boundaries; 1 to 4 hops.
PROMPTS = (33, 10 * BLOCK_SIZE - 1, 10 * BLOCK_SIZE, 10 * BLOCK_SIZE + 1, MAX_BATCH_TOKENS + 88)
CUTS = ([1], [10], [BLOCK_SIZE - 2], [BLOCK_SIZE - 1, BLOCK_SIZE + 1], [7, 9, 30, 40])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 1.0, "seed": 1234},
    "seed_top_k": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7},
    "seed_min_p": {"temperature": 1.0, "min_p": 0.05, "seed": 9},
    "penalties": {"frequency_penalty": 0.9, "presence_penalty": 0.6},
    "repetition": {"repetition_penalty": 1.5},
    "seed_penalties": {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.9},
    "logit_bias": {"logit_bias": {17: 3.0, 21: 2.0}},
}


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
@pytest.mark.parametrize("num_prompt_tokens", PROMPTS)
def test_moved_tokens_and_logprobs_are_those_of_an_unmoved_run(
    kind: str, num_prompt_tokens: int, request: pytest.FixtureRequest
) -> None:
    engines: tuple[Engine, Engine] = request.getfixturevalue(kind)
    prompt = make_prompt(num_prompt_tokens)
    expected = run_alone(engines[0], prompt, logprobs=0)
    assert len(set(expected.tokens)) > 20
    for cuts in CUTS:
        for is_cold in (True, False):
            if is_cold:
                for engine in engines:
                    engine.client.reset_prefix_cache()
            moved = run_moving(engines, cuts, prompt, logprobs=0)
            assert (moved.tokens, cuts) == (expected.tokens, cuts)
            assert moved.logprobs == expected.logprobs


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_sampling_state_moves_along(sampling: dict[str, Any], pair: tuple[Engine, Engine]) -> None:
    prompt = make_prompt(150)
    expected = run_alone(pair[0], prompt, **sampling)
    for cuts in ([6], [10, 20]):
        assert run_moving(pair, cuts, prompt, **sampling).tokens == expected.tokens


@pytest.mark.parametrize("sampling", [SAMPLINGS["seed"], SAMPLINGS["seed_penalties"]], ids=["seed", "seed_penalties"])
def test_seeded_prompt_longer_than_the_chunk_is_exact(sampling: dict[str, Any], pair: tuple[Engine, Engine]) -> None:
    """Stock vLLM dies of it on the CPU."""
    prompt = make_prompt(300)
    expected = run_alone(pair[0], prompt, **sampling)
    for engine in pair:
        engine.configure(96)
    assert run_moving(pair, [5, 30], prompt, **sampling).tokens == expected.tokens


@pytest.mark.parametrize("sampling", [{}, *SAMPLINGS.values()], ids=["greedy", *SAMPLINGS.keys()])
def test_recovery_from_tokens_alone_is_exact(sampling: dict[str, Any], pair: tuple[Engine, Engine]) -> None:
    """As after the death of an engine: the tokens are known, the KV is lost, the recompute is chunked."""
    prompt = make_prompt(300)
    expected = run_alone(pair[0], prompt, **sampling)
    pair[1].configure(64)
    for num_known in (1, 17, 31):
        part = pair[1].recover(prompt, expected.tokens[:num_known], **sampling)
        wait(pair, lambda: part.is_over)  # noqa: B023
        assert expected.tokens[:num_known] + part.tokens == expected.tokens


def test_min_tokens_and_stop_tokens_count_over_the_whole_request(pair: tuple[Engine, Engine]) -> None:
    prompt = make_prompt(150)
    free = run_alone(pair[0], prompt)
    stop = {"stop_token_ids": [free.tokens[30]], "min_tokens": free.tokens.index(free.tokens[30]) + 5}
    expected = run_alone(pair[0], prompt, **stop)
    moved = run_moving(pair, [12], prompt, **stop)
    assert (moved.tokens, moved.finish_reason, moved.stop_reason) == (
        expected.tokens,
        expected.finish_reason,
        expected.stop_reason,
    )


@pytest.mark.parametrize("constraint", ["regex", "json"])
def test_grammar_is_replayed_on_the_target(constraint: str, pair: tuple[Engine, Engine]) -> None:
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415  (nine seconds, for engines only)

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 30}},
        "required": ["a", "b"],
    }
    sampling: dict[str, Any] = {
        "regex": {"structured_outputs": {"regex": r"(ab|cd|ef){3}[0-9]{5}(xy){2,40}!"}},
        "json": {"structured_outputs": {"json": schema}, "temperature": 1.0, "seed": 3, "max_tokens": 80},
    }[constraint]
    # vLLM's record is changed by the engine that gets it, so each submit has its own.
    sampling["ignore_eos"] = False
    fresh = sampling.pop("structured_outputs")
    make = lambda: sampling | {"structured_outputs": StructuredOutputsParams(**fresh)}  # noqa: E731
    prompt = make_prompt(150)
    expected = run_alone(pair[0], prompt, **make())
    assert len(expected.tokens) > 12
    for cuts in ([6], [4, 10]):
        assert run_moving(pair, cuts, prompt, **make()).tokens == expected.tokens


def test_many_requests_cross_at_once(pair: tuple[Engine, Engine]) -> None:
    """Every request moves back and forth beside the others; each ends with its own tokens."""
    samplings = [{}, SAMPLINGS["seed"], SAMPLINGS["penalties"]]
    jobs = [(make_prompt(40 + 61 * index, salt=index), samplings[index % 3]) for index in range(9)]
    expected = [run_alone(pair[index % 2], prompt, **sampling).tokens for index, (prompt, sampling) in enumerate(jobs)]
    at = [index % 2 for index in range(len(jobs))]
    tokens: list[list[int]] = [[] for _ in jobs]
    parts = [pair[at[index]].submit(prompt, **sampling) for index, (prompt, sampling) in enumerate(jobs)]
    for cut in (8, 16, 24, 32):
        for index, (prompt, sampling) in enumerate(jobs):
            wait(pair, lambda: parts[index].tokens and len(tokens[index]) + len(parts[index].tokens) >= cut)  # noqa: B023
            source, target = pair[at[index]], pair[1 - at[index]]
            following = move(source, target, parts[index], tokens[index], prompt, **sampling)
            if following is parts[index]:
                continue
            tokens[index] += parts[index].tokens
            at[index] = 1 - at[index]
            parts[index] = following
    wait(pair, lambda: all(part.is_over for part in parts))
    assert [before + part.tokens for before, part in zip(tokens, parts, strict=True)] == expected


def test_request_that_ends_at_the_boundary_is_done_and_not_handed_off(pair: tuple[Engine, Engine]) -> None:
    prompt = make_prompt(60)
    for num_tokens in range(2, 7):
        part = pair[0].submit(prompt, max_tokens=num_tokens)
        wait(pair, lambda: bool(part.tokens))  # noqa: B023
        following = move(pair[0], pair[1], part, [], prompt, max_tokens=num_tokens)
        wait(pair, lambda: following.is_over)  # noqa: B023
        assert (following.finish_reason, following.handed_off) == ("length", None)
        assert len(part.tokens) + (0 if following is part else len(following.tokens)) == num_tokens
