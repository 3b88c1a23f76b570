"""The program of the container that fetches a model: the weights of one that engines refuse stay where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sluice_operator.resources.pods.model_volume import FETCH_PROGRAM, MODEL_DIRECTORY, Fetch

if TYPE_CHECKING:
    from pathlib import Path

# Stands in for `hf download`: notes what it is asked for, and writes config.json, or cannot.
DOWNLOAD = """
import os, pathlib, sys
arguments = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    print(*arguments, file=calls)
if os.environ["CONFIG"] == "unreachable":
    sys.exit(1)
pathlib.Path(arguments[arguments.index("--local-dir") + 1], "config.json").write_text(os.environ["CONFIG"])
"""
# An engine image from before the check.
NO_CHECK = "raise ModuleNotFoundError('sluice_engine.startup.model_check')"
HUB = {"huggingface_hub/__init__.py": "", "huggingface_hub/cli/__init__.py": "", "huggingface_hub/cli/hf.py": DOWNLOAD}
ALL = ["config.json", "everything"]


def fetch(
    folder: Path, config: str, *vllm_arguments: str, files: dict[str, str] | None = None
) -> tuple[int, list[str]]:
    """Runs the program; returns its exit status, and what it downloaded."""
    for name, text in (HUB | (files or {})).items():
        path = folder / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "model").mkdir()
    calls = folder / "calls"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(folder / "modules"), *sys.path]),
        "CALLS": str(calls),
        "CONFIG": config,
    }
    hub = Fetch(
        resolve=(),
        download=(
            sys.executable,
            "-m",
            "huggingface_hub.cli.hf",
            "download",
            "org/model",
            "--local-dir",
            MODEL_DIRECTORY,
        ),
        pattern_option=("--include",),
        environment=(),
    )
    rendered = hub.render_download((), vllm_arguments)
    assert rendered[2] == FETCH_PROGRAM
    model = str(folder / "model")
    rendered[2] = FETCH_PROGRAM.replace(MODEL_DIRECTORY, model)
    command = [sys.executable, *(model if part == MODEL_DIRECTORY else part for part in rendered[1:])]
    status = subprocess.run(command, env=environment, check=False).returncode
    expected = f"download org/model --local-dir {folder / 'model'}"
    made = [line.removeprefix(expected).strip() for line in calls.read_text().splitlines()]
    return status, [call.removeprefix("--include *") or "everything" for call in made]


@pytest.mark.parametrize(
    ("config", "arguments", "fetched"),
    [
        pytest.param('{"model_type": "llama"}', (), ALL, id="a model that is served"),
        pytest.param('{"state_size": 128}', (), ["config.json"], id="a model that is refused"),
        pytest.param('{"state_size": 128}', ("--hf-overrides={}",), ALL, id="a user who knows better"),
    ],
)
def test_weights_are_fetched_unless_the_engine_would_refuse_them(
    tmp_path: Path, config: str, arguments: tuple[str, ...], fetched: list[str]
) -> None:
    assert fetch(tmp_path, config, *arguments) == (0, fetched)


def test_an_image_without_the_check_gets_everything(tmp_path: Path) -> None:
    files = {"sluice_engine/__init__.py": NO_CHECK}
    assert fetch(tmp_path, '{"state_size": 128}', files=files) == (0, ALL)


def test_a_hub_that_does_not_answer_is_tried_again_by_the_kubelet(tmp_path: Path) -> None:
    assert fetch(tmp_path, "unreachable") == (1, ["config.json"])
