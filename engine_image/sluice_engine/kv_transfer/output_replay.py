"""Output that a request brings from another engine: replayed here, so that the request goes on in the middle.

In the scheduler its tokens become the request's output, so that ``max_tokens``, stop rules and logprobs count on, and
the grammar is replayed. vLLM's V2 model runner needs nothing more. The V1 runner, which CPUs use, needs its request
state filled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm.v1.worker.gpu_model_runner as v1_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from sluice_engine.core_messages import EXTRAS_KEY

if TYPE_CHECKING:
    from vllm.v1.request import Request

# One draw of the CPU sampler per token (vLLM: v1/sample/ops/topk_topp_sampler.py, forward_cpu).
_DRAW_LIMIT = 2**31


class GrammarReplayError(RuntimeError):
    """Tokens generated elsewhere do not fit the request's own grammar."""


class ReplayGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator that finds its place again by counting output tokens.

    vLLM's V1 runner takes back the draw of a discarded sample by ``set_offset``, which CPU generators do not have: a
    seeded prompt of several chunks would end the engine. Here going back means starting over, one draw per output
    token.

    Args:
        seed: Seed of the request.
        state: Request state whose output tokens have each cost one draw.
    """

    def __new__(cls, seed: int, state: CachedRequestState) -> ReplayGenerator:  # noqa: ARG004, PYI034
        """Makes a generator on the CPU; torch's own constructor takes a device only."""
        return super().__new__(cls, device="cpu")  # type: ignore[no-any-return]

    def __init__(self, seed: int, state: CachedRequestState) -> None:
        self._seed = seed
        self._state = state
        self.replay()

    def replay(self) -> None:
        """Goes to where the next output token draws."""
        self.manual_seed(self._seed)
        num_draws = len(self._state.output_token_ids)
        if num_draws:
            torch.randint(0, _DRAW_LIMIT, (num_draws,), generator=self, dtype=torch.long)

    def get_offset(self) -> int:
        """What vLLM reads before it takes a draw back."""
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002
        """Takes the draw of a discarded sample back."""
        self.replay()


class ResumedRequestState(CachedRequestState):  # type: ignore[misc]
    """The V1 runner's state of a request, earlier output included."""

    output_token_ids: list[int]
    generator: torch.Generator | None

    def __post_init__(self) -> None:
        """Fills in what the scheduler's record of a new request has no field for."""
        parameters = self.sampling_params
        if parameters is not None and not self.output_token_ids:
            extras = (parameters.extra_args or {}).get(EXTRAS_KEY, {})
            self.output_token_ids = list(extras.get("output_token_ids", ()))
        if self.generator is not None and self.generator.device.type == "cpu":
            self.generator = ReplayGenerator(parameters.seed, self)
        super().__post_init__()


def install_in_runner() -> None:
    """Makes the V1 model runner keep ``ResumedRequestState``; once or often is the same."""
    v1_runner.CachedRequestState = ResumedRequestState


def restore_output(request: Request, output_token_ids: list[int]) -> None:
    """Makes tokens generated elsewhere the beginning of the request's output.

    Args:
        request: A request that no queue holds yet.
        output_token_ids: Its tokens so far, in order.
    """
    if not output_token_ids:
        return
    request.append_output_token_ids(output_token_ids)
    # vLLM's prefill statistics hold that no more than the prompt is ever cached.
    request.prefill_stats = None


def replay_grammar(request: Request) -> None:
    """Brings a freshly compiled grammar to where the request's output is.

    Raises:
        GrammarReplayError: The output does not fit.
    """
    tokens = list(request.output_token_ids)
    grammar = request.structured_output_request.grammar
    if tokens and not grammar.accept_tokens(request.request_id, tokens):
        raise GrammarReplayError(
            f"request {request.request_id}: its {len(tokens)} earlier tokens do not fit its grammar"
        )
