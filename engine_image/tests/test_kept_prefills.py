"""A prefill engine under Disaggregated ends a prefill with its first token and keeps the KV until somebody pulls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_harness import make_prompt, run_alone, wait

from sluice_engine import core_messages

if TYPE_CHECKING:
    from engine_harness import Engine

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["pair", "async_pair"])
def test_finished_prefills_keep_their_kv_and_go_on_elsewhere_token_by_token(
    kind: str, request: pytest.FixtureRequest
) -> None:
    source, target = request.getfixturevalue(kind)
    prompts = [make_prompt(100 + 40 * index, salt=index) for index in range(3)]
    alone = [run_alone(target, prompt, max_tokens=20).tokens for prompt in prompts]
    source.configure(512, role="P-heavy", strategy="Disaggregated")
    target.configure(0, role="D-heavy", strategy="Disaggregated", chunk_sizes_tokens=[0, 512])
    firsts = [source.submit(prompt, max_tokens=20) for prompt in prompts]
    wait([source], lambda: all(part.is_over for part in firsts))
    assert [part.tokens for part in firsts] == [tokens[:1] for tokens in alone], "nothing decodes there"
    load = source.load()
    assert load.running_decodes == 0
    assert load.kv_blocks_pinned == load.kv_blocks_used > 0
    rest = []
    for prompt, part in zip(prompts, firsts, strict=True):
        key = f"grant-{part.request_id}"
        assert target.grant(key, len(prompt) + 2).is_granted
        rest.append(target.resume(part, part.tokens, prompt, grant_key=key, max_tokens=20))
    wait([source, target], lambda: all(part.is_over for part in rest))
    assert [a.tokens + b.tokens for a, b in zip(firsts, rest, strict=True)] == alone
    for part in firsts:
        source.command(core_messages.ReleaseCommand(request_id=part.request_id))
    wait([source, target], lambda: source.is_idle() and target.is_idle())


def test_what_is_recovered_or_ends_with_its_first_token_is_not_handed_off(pair: tuple[Engine, Engine]) -> None:
    source, _ = pair
    prompt = make_prompt(90)
    alone = run_alone(source, prompt, max_tokens=12).tokens
    source.configure(512, role="P-heavy", strategy="Disaggregated")
    single = source.submit(prompt, max_tokens=1)
    extras = core_messages.RequestExtras(output_token_ids=tuple(alone[:1]), is_recovery=True)
    recovered = source.submit(prompt, max_tokens=12, extras=extras)
    wait([source], lambda: single.is_over and recovered.is_over)
    assert single.handed_off is None
    assert recovered.handed_off is None
    assert recovered.tokens == alone[1:]
    wait([source], source.is_idle)


@pytest.mark.parametrize("plan", [{"role": "D-heavy"}, {"chunk_sizes_tokens": [512]}], ids=["D-heavy", "no roles"])
def test_an_engine_without_another_role_to_hand_off_to_decodes_itself(
    pair: tuple[Engine, Engine], plan: dict[str, object]
) -> None:
    engine = pair[0]
    engine.configure(512, **{"role": "P-heavy", "strategy": "Disaggregated", **plan})
    part = engine.submit(make_prompt(60), max_tokens=5)
    wait([engine], lambda: part.is_over)
    assert len(part.tokens) == 5
    assert part.handed_off is None
