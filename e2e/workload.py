"""Requests with known answers: prompts around block and chunk boundaries, with every kind of sampling state.

``make_requests`` is deterministic. ``answers`` runs stock vLLM once (``stock_vllm.py``) and keeps the result beside the
model, keyed by the requests and the model, so that later runs compare at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sluice.v1 import sampling_pb2

STOCK_VLLM = Path(__file__).with_name("stock_vllm.py")
BLOCK = 32
VOCABULARY = 2000  # smaller than the tiny model's, so that no prompt has special tokens

# One token, around one and two blocks, around the example's chunk sizes (64 and 256), and a long one.
PROMPT_LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 95, 127, 128, 129, 255, 256, 257, 319, 320, 321, 511, 513, 640, 1000)

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1234},
    "penalties": {
        "temperature": 0.7,
        "seed": 99,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.1,
    },
    "biased": {"temperature": 0.0, "logit_bias": {"17": 4.0, "900": -5.0}, "min_tokens": 8, "logprobs": 1},
    "min_p": {"temperature": 1.0, "min_p": 0.02, "seed": 7, "logprobs": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request and how to sample it.

    Args:
        name: Kind and prompt length; unique.
        prompt_token_ids: The prompt.
        sampling: Arguments of ``vllm.SamplingParams``.
    """

    name: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]

    def to_proto(self) -> sampling_pb2.SamplingParams:
        """Returns the same sampling parameters as Sluice's protobuf message."""
        fields = dict(self.sampling)
        logprobs = fields.pop("logprobs", None)
        bias = {int(token): value for token, value in fields.pop("logit_bias", {}).items()}
        message = sampling_pb2.SamplingParams(logit_bias=bias, **fields)
        if logprobs is not None:
            message.num_logprobs = logprobs
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of stock vLLM.

    Args:
        token_ids: Output tokens.
        finish_reason: ``length`` or ``stop``.
        logprobs: Logprob of each output token; None if the request did not ask for them.
    """

    token_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None

    def cut(self, request: Request) -> Answer:
        """Return the answer to a request that asks the same for fewer tokens."""
        length = request.sampling["max_tokens"]
        return replace(self, token_ids=self.token_ids[:length], logprobs=self.logprobs and self.logprobs[:length])


def shorten(request: Request, answer: Answer, max_tokens: int) -> tuple[Request, Answer]:
    """Return a request that asks the same for fewer tokens, and its answer."""
    short = replace(request, sampling={**request.sampling, "max_tokens": max_tokens})
    return short, answer.cut(short)


def make_requests(count: int, *, tokens_per_hop: int = 32, seed: int = 5) -> list[Request]:
    """Make ``count`` requests: every prompt length with every kind of sampling before any pair repeats.

    The more hops a test may request for one (``index % 5``), the longer its answer: by ``tokens_per_hop``.
    """
    rng = random.Random(seed)
    pairs = [(length, kind) for kind in SAMPLING for length in PROMPT_LENGTHS]
    requests = []
    for index in range(count):
        length, kind = pairs[index % len(pairs)]
        sampling = {"max_tokens": 56 + tokens_per_hop * (index % 5), "ignore_eos": True, **SAMPLING[kind]}
        if "seed" in sampling:
            sampling["seed"] += index
        prompt = make_prompt(length, rng)
        requests.append(Request(name=f"{kind}-{length}-{index}", prompt_token_ids=prompt, sampling=sampling))
    return requests


def make_prompt(num_tokens: int, rng: random.Random) -> list[int]:
    """Make a prompt of ordinary tokens."""
    return [rng.randrange(3, VOCABULARY) for _ in range(num_tokens)]


def answers(model: Path, requests: list[Request], cache: Path) -> list[Answer]:
    """Return the answers of stock vLLM, from the cache if it has them.

    Args:
        model: Folder of the model.
        requests: The requests.
        cache: Folder for results.
    """
    asked = [{"prompt_token_ids": r.prompt_token_ids, "sampling": r.sampling} for r in requests]
    key = hashlib.sha256(json.dumps(asked).encode())
    key.update(STOCK_VLLM.read_bytes())
    key.update((model / "model.safetensors").read_bytes())
    kept = cache / f"answers-{key.hexdigest()[:16]}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        # Another worker may be asking for the same.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            requests_file, fresh = cache / "requests.json", cache / "fresh.json"
            requests_file.write_text(json.dumps(asked))
            subprocess.run([sys.executable, str(STOCK_VLLM), str(model), str(requests_file), str(fresh)], check=True)
            fresh.rename(kept)
    return [Answer(**answer) for answer in json.loads(kept.read_text())]
