"""Refuses a model that cannot be served, by its config.json, before vLLM loads for minutes.

    python -m sluice_engine.startup.model_check DIRECTORY [ARGUMENT OF VLLM ...]

says the same before the weights are fetched: it ends with the exit status of a model that is refused, or with 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sluice_core.model_support import find_refusal
from sluice_engine.errors import ModelRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_model(model: str, vllm_arguments: Sequence[str]) -> None:
    """Refuses a model whose layers do not all have full attention.

    Args:
        model: Its directory; what is still on a hub is left to vLLM.
        vllm_arguments: Arguments of vLLM, which may change what config.json says.

    Raises:
        ModelRefusedError: Names the field of config.json and its value.
    """
    if reason := find_refusal(Path(model), vllm_arguments):
        raise ModelRefusedError(reason)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks a model's directory; returns the exit status."""
    model, *vllm_arguments = sys.argv[1:] if arguments is None else arguments
    try:
        check_model(model, vllm_arguments)
    except ModelRefusedError as error:
        print(f"sluice_engine: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
