"""A model is refused by its config.json alone, in an engine and before its weights are fetched."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from sluice_engine.errors import ModelRefusedError
from sluice_engine.startup import model_check
from sluice_engine.startup.model_check import check_model

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_is_refused_in_one_line_and_with_the_status_of_a_refusal(tmp_path: Path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"sliding_window": 4096}')
    expected = f"{path}: sliding_window is 4096; models with full attention in every layer are supported"
    with pytest.raises(ModelRefusedError) as refused:
        check_model(str(tmp_path), ("--enforce-eager",))
    assert str(refused.value) == expected
    assert model_check.main([str(tmp_path), "--enforce-eager"]) == 7
    assert capsys.readouterr().err == f"sluice_engine: {expected}\n"
    override = '--hf-overrides={"sliding_window": null}'
    check_model(str(tmp_path), (override,))
    assert model_check.main([str(tmp_path), override]) == 0


def test_the_check_before_the_weights_imports_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"state_size": 128}')
    program = (
        "import sys; from sluice_engine.startup import model_check; print(model_check.main(), 'vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "7 False\n"
    assert done.stderr.count("\n") == 1
