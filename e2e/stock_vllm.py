"""Answers requests with stock vLLM alone. Moved, recovered and re-chunked requests must get the same answers.

Runs as a program: reads a JSON list of requests, writes a JSON list of answers. It uses one engine, no plugin, no KV
connector, and whole prompts in one chunk.

Usage: python e2e/stock_vllm.py MODEL REQUESTS.json ANSWERS.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Set before vLLM is imported: no usage statistics, no downloads, no Sluice plugin, and one thread and nothing compiled
# like Sluice's engines.
os.environ.update(
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_PLUGINS="",
    OMP_NUM_THREADS="1",
    TORCH_COMPILE_DISABLE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    return {
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": logprobs,
    }


def _sampling(arguments: dict[str, Any]) -> dict[str, Any]:
    """Turns the keys of logit_bias into integers, which JSON does not have as keys."""
    bias = arguments.get("logit_bias")
    return arguments if bias is None else {**arguments, "logit_bias": {int(token): b for token, b in bias.items()}}


def main(model: str, requests_path: Path, answers_path: Path) -> None:
    """Generates every request of ``requests_path``: {prompt_token_ids, sampling: SamplingParams arguments}."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415  the environment above must be set first

    requests = json.loads(requests_path.read_text())
    llm = LLM(
        model=model,
        dtype="float32",
        block_size=32,
        max_model_len=4096,
        max_num_batched_tokens=40960,
        max_num_seqs=32,  # so many of the prompts that tests ask fit one iteration, so none is cut into chunks
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests],
        [SamplingParams(detokenize=False, **_sampling(request["sampling"])) for request in requests],
        use_tqdm=False,
    )
    answers_path.write_text(json.dumps([_answer(output) for output in outputs]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
