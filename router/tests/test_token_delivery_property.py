"""Any interleaving of messages, deaths, moves and cancels: every token once and in order, and nothing leaks."""

from __future__ import annotations

from data_plane_harness import Harness
from fake_engine import PARAMETERS, expected_output, make_plan
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.v1 import engine_pb2, sampling_pb2
from sluice_router.settings import make_limits

NAMES = ("p0", "p1", "d0", "d1")
ROLES = {name: name[0].upper() for name in NAMES}
CAUSES = (
    engine_pb2.MOVE_CAUSE_PREFILL_DONE,
    engine_pb2.MOVE_CAUSE_DEGRADE,
    engine_pb2.MOVE_CAUSE_BACKFLOW,
    engine_pb2.MOVE_CAUSE_DRAIN,
)
# Time is not what is tested here: only grants may expire.
LIMITS = make_limits(silence_limit_s=1e6, iteration_age_floor_s=1e6, wait_limit_s=1e6, max_recoveries=5, max_deaths=3)
# Degradations follow one another at once.
NO_PAUSE = {**PARAMETERS, "min_tokens_between_moves": "0"}
names = st.sampled_from(NAMES)


class DataPlaneMachine(RuleBasedStateMachine):
    """Drives the router with everything that can happen to it, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(ROLES, limits=LIMITS, plan=False)
        self.harness.router.apply_plan(make_plan(ROLES, strategy_parameters=NO_PAUSE))
        self.harness.deliver()
        self.generation = 1
        self.epoch = 1
        self.is_calm = False

    @initialize(is_calm=st.booleans())
    def choose(self, is_calm):
        """Without deaths and cancels requests live long enough for many moves."""
        self.is_calm = is_calm

    @rule(
        prompt_tokens=st.integers(1, 70),
        max_tokens=st.sampled_from([1, 2, 30, 60]),
        number=st.integers(1, 3),
        stop_at=st.sampled_from([None, None, 1, 7]),
        is_sampled=st.booleans(),
    )
    def admit(self, prompt_tokens, max_tokens, stop_at, is_sampled, number):
        for extra in range(number):
            sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=float(is_sampled))
            _, response_stream = self.harness.admit(prompt_tokens + extra, sampling=sampling)
            response_stream.stop_at = stop_at

    @precondition(lambda self: self.harness.state.requests.live and not self.is_calm)
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(list(self.harness.state.requests.live)))
        self.harness.response_streams[request_id].is_cancelled = True
        self.harness.router.cancel(request_id)

    @precondition(lambda self: self.harness.state.requests.live and not self.is_calm)
    @rule(data=st.data())
    def break_sink(self, data):
        request_id = data.draw(st.sampled_from(list(self.harness.state.requests.live)))
        self.harness.response_streams[request_id].raises = RuntimeError("broken response_stream")

    @rule(name=names)
    def deliver_down(self, name):
        self.harness.deliver_down(name)

    @rule(name=names)
    def deliver_up(self, name):
        self.harness.deliver_up(name)

    @rule()
    def deliver_all(self):
        self.harness.deliver()

    @rule(name=names, num_steps=st.integers(1, 3))
    def step(self, name, num_steps):
        self.harness.clock.advance(0.01)
        for _ in range(num_steps if name in self.harness.cores else 0):
            self.harness.step(name)

    @rule(num_steps=st.integers(1, 4))
    def step_all(self, num_steps):
        for _ in range(num_steps):
            self.harness.step_all()

    @rule(name=names, cause=st.sampled_from(CAUSES), is_delivered=st.booleans())
    def propose(self, name, cause, is_delivered):
        if name in self.harness.engines:
            self.harness.up[name].append(self.harness.cores[name].propose(cause))
        if is_delivered:
            self.harness.deliver()

    @precondition(lambda self: self.harness.state.requests.live)
    @rule(data=st.data(), name=names)
    def move_by_hand(self, data, name):
        request_id = data.draw(st.sampled_from(list(self.harness.state.requests.live)))
        self.harness.router.move(request_id, name)

    @rule(name=names)
    def return_unstarted(self, name):
        if name in self.harness.engines:
            self.harness.up[name].append(self.harness.cores[name].return_unstarted())

    @precondition(lambda self: not self.is_calm)
    @rule(name=names)
    def kill(self, name):
        self.harness.kill(name)

    @precondition(lambda self: not self.is_calm)
    @rule(name=names)
    def revive(self, name):
        if name not in self.harness.engines:
            self.epoch += 1
            self.harness.attach(name, epoch=self.epoch)

    @precondition(lambda self: not self.is_calm)
    @rule(name=names)
    def replace_stream(self, name):
        """A newer stream says hello before the old one is known to be over."""
        self.epoch += 1
        self.harness.attach(name, epoch=self.epoch)

    @precondition(lambda self: not self.is_calm)
    @rule(name=names)
    def cut(self, name):
        """The stream breaks, and with it what was on the way in both directions; the engine goes on."""
        if name in self.harness.engines:
            self.harness.cut(name)

    @rule(name=names)
    def reconnect(self, name):
        if name in self.harness.cores:
            self.harness.reconnect(name)

    @rule(name=names, reason=st.sampled_from(["", "kv"]))
    def refuse_grants(self, name, reason):
        if name in self.harness.engines:
            self.harness.cores[name].refuse_grants = reason

    @rule(name=names, reason=st.sampled_from(["", "preempted"]))
    def refuse_hand_offs(self, name, reason):
        if name in self.harness.engines:
            self.harness.cores[name].refuse_hand_offs = reason

    @rule(drained=st.sets(names, max_size=2))
    def change_plan(self, drained):
        self.generation += 1
        roles = {name: role + ("-drain" if name in drained else "") for name, role in ROLES.items()}
        self.harness.router.apply_plan(make_plan(roles, generation=self.generation, strategy_parameters=NO_PAUSE))

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.5]))
    def tick(self, seconds):
        self.harness.clock.advance(seconds)
        self.harness.router.tick()

    @invariant()
    def engines_that_keep_the_rules_are_believed(self):
        assert not self.harness.count("engine_losses", "protocol")

    @invariant()
    def each_request_is_in_one_place(self):
        state = self.harness.state
        assert state.requests.awaiting_resume.keys() <= state.requests.waiting.keys()
        for request_id, request in state.requests.live.items():
            places = (request.submission is not None) + (request_id in state.requests.waiting)
            assert places == 1, f"{request_id} is in {places} places"
            if request.submission is not None:
                assert not request.submission.engine.is_lost
                assert request.pending_resume is None
                assert request.submission.request is request
                assert request.submission.engine.slots[request.submission.slot] is request.submission

    def teardown(self):
        """Everybody comes back, and all that is left ends."""
        harness = self.harness
        for name in NAMES:
            if name not in harness.engines:
                self.epoch += 1
                harness.attach(name, epoch=self.epoch)
            harness.cores[name].refuse_grants = harness.cores[name].refuse_hand_offs = ""
        harness.router.apply_plan(make_plan(ROLES, generation=self.generation + 1, strategy_parameters=NO_PAUSE))
        harness.deliver()
        harness.run(300)
        harness.clock.advance(3)
        harness.router.tick()
        harness.run(20)
        for response_stream in harness.response_streams.values():
            assert response_stream.token_ids == expected_output(response_stream.prompt, len(response_stream.token_ids))
            assert response_stream.is_over or response_stream.is_cancelled or response_stream.raises
            if response_stream.finish is not None and not response_stream.raises:
                assert response_stream.finish.usage.output_tokens == len(response_stream.token_ids)
        harness.assert_idle()


DataPlaneMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyInterleaving = DataPlaneMachine.TestCase
