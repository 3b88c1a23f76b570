"""While one model replaces another, a router serves its own model by its own engines and its own name."""

from __future__ import annotations

from data_plane_harness import Harness
from fake_engine import make_plan

from sluice.v1 import control_pb2, plan_pb2
from sluice_router.errors import NoEngineError
from sluice_router.settings import make_limits

ROLES = {"old0": "D", "old1": "D", "new0": "D"}
OLD, NEW = (
    plan_pb2.ServedModel(model_id="old", served_name="chat-1"),
    plan_pb2.ServedModel(model_id="new", served_name="chat-2"),
)


def make_harness(model_id: str = "old", served_models: tuple[plan_pb2.ServedModel, ...] = (OLD,)) -> Harness:
    """Two engines of the old model and one of the new one; nothing but the id says which is which."""
    harness = Harness(model_id=model_id, limits=make_limits(max_deaths=5))
    for name in ROLES:
        harness.attach(name, model_id=name[:3])
    plan = make_plan(ROLES, served_models=served_models, served_model_name="of routers that know no id")
    harness.router.apply_plan(plan)
    harness.deliver()
    return harness


def test_requests_run_on_engines_of_the_routers_own_model_alone() -> None:
    for model_id, engines in (("old", {"old0", "old1"}), ("new", {"new0"}), ("", set(ROLES))):
        harness = make_harness(model_id)
        admitted = [harness.admit(first=number)[0] for number in range(1, 20)]
        assert {harness.engine_of(request_id) for request_id in admitted} == engines
        harness.run()
        harness.assert_idle()


def test_each_router_answers_by_the_name_of_its_model() -> None:
    both = (NEW, OLD)
    assert make_harness("old", both).router.model.name == "chat-1"
    assert make_harness("new", both).router.model.name == "chat-2"
    assert make_harness("", both).router.model.name == "of routers that know no id"


def test_engines_of_the_other_model_are_not_asked_for_an_answer() -> None:
    for model_id, engines in (("old", {"old0", "old1"}), ("new", {"new0"}), ("", set(ROLES))):
        harness = make_harness(model_id)
        harness.router.claim(b"key", [].append)
        asked = {name for name, messages in harness.down.items() for message in messages if message.claims}
        assert asked == engines


def test_an_engine_of_the_other_model_is_reported_as_that_and_as_no_fault_of_its_own() -> None:
    states = {
        engine.engine_id: (engine.state, engine.serves_other_model)
        for engine in make_harness().router.describe().engines
    }
    assert states["old0"] == (control_pb2.ENGINE_STATE_READY, False)
    assert states["new0"] == (control_pb2.ENGINE_STATE_REFUSED, True)


def test_a_stream_of_the_replaced_model_goes_on_among_its_engines_and_then_ends_clearly() -> None:
    harness = make_harness()
    request_id, stream = harness.admit(max_tokens=50)
    harness.step_all()
    first = harness.engine_of(request_id)
    harness.router.apply_plan(make_plan(ROLES, generation=2, served_models=(NEW, OLD)))
    harness.kill(first)
    for _ in range(3):
        harness.step_all()
    other = harness.engine_of(request_id)
    assert {first, other} == {"old0", "old1"}
    assert stream.token_ids
    harness.kill(other)
    harness.run()
    assert isinstance(stream.error, NoEngineError)
    assert "replaced" in str(stream.error)
    assert stream.finish is None
    assert not harness.cores["new0"].submitted
    harness.assert_idle()


def test_a_stream_of_the_replaced_model_waits_for_its_last_engine_while_that_may_come_back() -> None:
    harness = make_harness()
    request_id, stream = harness.admit(max_tokens=50)
    harness.step_all()
    last = harness.engine_of(request_id)
    harness.router.apply_plan(make_plan(ROLES, generation=2, served_models=(NEW, OLD)))
    harness.deliver()
    harness.kill({"old0": "old1", "old1": "old0"}[last])
    harness.cut(last)
    harness.clock.advance(0.1)
    harness.router.tick()
    assert stream.error is None
    harness.reconnect(last)
    harness.run()
    assert stream.finish is not None
    harness.assert_idle()


def test_while_the_plan_has_the_model_a_stream_waits_for_its_engines_to_come_back() -> None:
    harness = make_harness()
    request_id, stream = harness.admit(max_tokens=20)
    harness.step_all()
    for name in ("old0", "old1"):
        harness.kill(name)
    for _ in range(3):
        harness.step_all()
    assert stream.error is None
    assert request_id in harness.state.requests.waiting
    harness.attach("old0", model_id="old")
    harness.deliver()
    harness.run()
    assert stream.finish is not None
    assert len(stream.token_ids) == 20
