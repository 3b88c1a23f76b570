"""What a refused manifest's owner reads, case by case of the table of verdicts, against what was recorded.

Whoever means to change a message records them anew, and reviews the difference:

    .venv/bin/python operator/tests/test_refusal_messages.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from verdicts import LEAST, Case, merge, read_table

from sluice_operator.api.field_effects import FieldEffect
from sluice_operator.api.manifest import ManifestError, check_manifest
from sluice_operator.api.spec_changes import diff_specs

RECORDED = Path(__file__).with_name("refusal_messages.yaml")
TABLE = read_table()
REFUSED = [case for case in TABLE if case.refused]


def read_messages(case: Case) -> list[str]:
    """Reads what is wrong with a manifest, a line for each."""
    try:
        check_manifest(case.manifest)
    except ManifestError as error:
        return [str(problem) for problem in error.problems]
    return []


RECORDS = yaml.safe_load(RECORDED.read_text()) if RECORDED.exists() else {}


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_a_refusal_reads_as_it_was_recorded(case: Case) -> None:
    assert read_messages(case) == RECORDS[case.name]


def test_every_refused_case_has_its_messages() -> None:
    assert set(RECORDS) == {case.name for case in REFUSED}
    assert all(RECORDS.values())


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        ({}, []),
        ({"replicas": 5}, [("spec.replicas 2 -> 5", FieldEffect.LIVE)]),
        (
            {"slo": {"ttftMilliseconds": 9}, "chunkSizes": {"prefillHeavy": 512}},
            [
                ("spec.chunkSizes.prefillHeavy 1024 -> 512", FieldEffect.LIVE),
                ("spec.slo.ttftMilliseconds 500 -> 9", FieldEffect.LIVE),
            ],
        ),
        ({"engine": {"image": "x" * 70}}, [(f"spec.engine.image none -> {'x' * 57}...", FieldEffect.RESTARTS_ENGINES)]),
        ({"engine": {"image": "x" * 60}}, [(f"spec.engine.image none -> {'x' * 60}", FieldEffect.RESTARTS_ENGINES)]),
        ({"router": {"replicas": 3}}, [("spec.router.replicas 2 -> 3", FieldEffect.LIVE)]),
        ({"router": {"image": "x"}}, [("spec.router.image none -> x", FieldEffect.RESTARTS_ROUTERS)]),
        ({"router": {"service": {"port": 1}}}, [("spec.router.service.port 8000 -> 1", FieldEffect.RESTARTS_ROUTERS)]),
        ({"model": {"name": "n"}}, [("spec.model.name m -> n", FieldEffect.RESTARTS_ALL)]),
        (
            {"network": {"tls": {"mode": "SecretRef", "secretName": "s"}}},
            [
                ("spec.network.tls.mode Disabled -> SecretRef", FieldEffect.RESTARTS_ALL),
                ("spec.network.tls.secretName none -> s", FieldEffect.RESTARTS_ALL),
            ],
        ),
        (
            {"rollout": {"gate": {"minRequests": 3}}},
            [("spec.rollout.gate none -> {'minRequests': 3}", FieldEffect.LIVE)],
        ),
    ],
    ids=lambda value: "" if isinstance(value, list) else ",".join(value),
)
def test_an_edit_is_listed_field_by_field_with_what_it_does(edit, changes) -> None:
    before, after = (check_manifest(merge(LEAST, {"spec": spec})).spec for spec in ({}, edit))
    assert [(str(change), change.effect) for change in diff_specs(before, after)] == changes


def write() -> None:
    """Records all messages."""
    messages = {case.name: read_messages(case) for case in REFUSED}
    RECORDED.write_text(yaml.safe_dump(messages, sort_keys=False, width=150))


if __name__ == "__main__":
    write()
    sys.stdout.write(f"messages of {len(REFUSED)} manifests are in {RECORDED}\n")
