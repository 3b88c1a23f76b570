"""Where a request is cut: a bounded binary search for the ratio that balances two engines.

Source: DynaServe, section 4.1, Algorithm 1.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TOLERANCE_S: Final = 0.001  # epsilon of line 7; the paper does not say how large it is


class ServerClock:
    """What one engine has to do before a request, and what the request's tokens would add, in seconds.

    A token costs what it adds to iterations that run anyway (its marginal cost). What an iteration costs without it is
    paid by whoever else is in it.

    Args:
        prefill_s: Prefill work that is committed.
        decode_s: Decode work that is committed.
        per_prefill_s: A prompt token.
        per_work_s: A token pair of prompt attention.
        per_decode_s: A decode of one token.
        per_context_s: A token of the context of such a decode.
        pass_s: An iteration as they are now.
    """

    __slots__ = ("decode_s", "pass_s", "per_context_s", "per_decode_s", "per_prefill_s", "per_work_s", "prefill_s")

    def __init__(
        self,
        *,
        prefill_s: float,
        decode_s: float,
        per_prefill_s: float,
        per_work_s: float,
        per_decode_s: float,
        per_context_s: float,
        pass_s: float = 0.0,
    ) -> None:
        self.prefill_s = prefill_s
        self.decode_s = decode_s
        self.per_prefill_s = per_prefill_s
        self.per_work_s = per_work_s
        self.per_decode_s = per_decode_s
        self.per_context_s = per_context_s
        self.pass_s = pass_s

    @property
    def committed_s(self) -> float:
        """All that is committed."""
        return self.prefill_s + self.decode_s

    def predict_s(self, prompt_tokens: int, first: int, last: int) -> float:
        """Predict when all is done that is committed, and tokens ``first + 1`` to ``last`` of a request.

        Args:
            prompt_tokens: Tokens of the prompt; those behind are decoded.
            first: Tokens that another engine has computed.
            last: Tokens that have KV in the end.
        """
        prefill_end = min(last, prompt_tokens)
        total_s = self.prefill_s + self.decode_s
        if first < prefill_end:
            tokens = prefill_end - first
            total_s += tokens * (self.per_prefill_s + self.per_work_s * (first + tokens / 2))
        decode_start = max(first, prompt_tokens)
        if decode_start < last:
            tokens = last - decode_start
            total_s += tokens * (self.per_decode_s + self.per_context_s * (decode_start + tokens / 2))
        return total_s


class Split(NamedTuple):
    """Where a request is cut.

    Args:
        token: s: the first engine computes tokens 1 to s, the second one the others.
        first_s: T1, when the first engine is done with all that it has.
        second_s: T2, the same of the second one.
    """

    token: int
    first_s: float
    second_s: float

    @property
    def done_s(self) -> float:
        """When both are done."""
        return max(self.first_s, self.second_s)


def search_split(
    prompt_tokens: int,
    output_tokens: int,
    first: ServerClock,
    second: ServerClock,
    *,
    num_steps: int,
    cuts_prompts: bool,
) -> Split:
    """Search the cut at which both engines are done at the same time (Algorithm 1).

    Args:
        prompt_tokens: P.
        output_tokens: D, as predicted.
        first: The engine of the first part.
        second: The engine of the second one.
        num_steps: K.
        cuts_prompts: Prompts may be cut; False: the search begins with the prompt's end as its lower bound.
    """
    total = prompt_tokens + output_tokens
    ratio = prompt_tokens / total
    if first.committed_s == 0.0 and second.committed_s == 0.0:  # lines 1 and 2
        return _predict(prompt_tokens, total, prompt_tokens, first, second)
    low, high = 0.0 if cuts_prompts else ratio, 1.0  # line 3
    for _ in range(num_steps):  # line 4
        split = _predict(prompt_tokens, total, _round(ratio, total), first, second)  # lines 5 and 6
        if abs(split.first_s - split.second_s) < TOLERANCE_S:  # lines 7 and 8
            return split
        if split.first_s > split.second_s:  # lines 9 and 10
            high = ratio
        else:
            low = ratio
        ratio = (low + high) / 2
    return _predict(prompt_tokens, total, _round(ratio, total), first, second)  # line 12


def _round(ratio: float, total: int) -> int:
    """Compute s of a ratio; a ratio that is a whole number of tokens is that number, whatever the rounding."""
    return int(ratio * total + 1e-6)


def _predict(prompt_tokens: int, total: int, token: int, first: ServerClock, second: ServerClock) -> Split:
    return Split(token, first.predict_s(prompt_tokens, 0, token), second.predict_s(prompt_tokens, token, total))
