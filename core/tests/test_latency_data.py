"""The package's data is what the conversion makes of the sources."""

import importlib.util
import os
from importlib import resources
from pathlib import Path

import pytest

from sluice_core.latency.catalog import GPUS
from sluice_core.latency.kernels import load_data

ROOT = Path(__file__).parents[2]
SOURCES = os.environ.get("SLUICE_PROFILE_SOURCES", "")  # see benchmarks/profiles/convert.py
MOST_BYTES = 3_000_000
DATA = resources.files("sluice_core.latency") / "data"


def load_program(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "profiles" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def converted():
    """Every file that the conversion makes, by name."""
    return load_program("convert").convert(Path(SOURCES))


@pytest.mark.skipif(not SOURCES, reason="SLUICE_PROFILE_SOURCES does not name the folder of the measurements")
def test_data_is_what_the_conversion_makes_of_the_sources(converted):
    assert {name for name in list_data() if name.endswith(".gz")} == set(converted)
    for name, content in converted.items():
        # Keys and pairs as JSON has them.
        assert as_json(content) == load_data(name), f"{name}: run benchmarks/profiles/convert.py again"


def as_json(value):
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def list_data():
    return [entry.name for entry in DATA.iterdir()]


def test_data_is_small_and_carries_its_licences():
    assert sum(len((DATA / name).read_bytes()) for name in list_data()) < MOST_BYTES
    notice = (DATA / "NOTICE.md").read_text()
    for text in (*GPUS, "vidur", "distserve", "NVIDIA CORPORATION", "Microsoft Corporation", "Apache-2.0", "MIT"):
        assert text in notice


def test_the_document_states_the_errors_that_the_report_finds():
    report = load_program("report")
    page = ROOT / "docs" / "measurements" / "latency-profiles.md"
    for lines in (report.format_gemm_table(), report.format_fit_table()):
        assert "\n".join(lines) in page.read_text(), f"put the tables of benchmarks/profiles/report.py into {page}"
