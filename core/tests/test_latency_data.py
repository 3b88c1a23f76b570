"""The package's data: its size, its licences, and the errors that the document states."""

import importlib.util
from importlib import resources
from pathlib import Path

from sluice_core.latency.known_gpus import GPUS

ROOT = Path(__file__).parents[2]
MOST_BYTES = 3_000_000
DATA = resources.files("sluice_core.latency") / "data"


def load_program(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "profiles" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
