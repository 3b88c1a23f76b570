"""A fault that a harness or a stand-in notices fails its test, though the product catches what it raises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import asyncio
import logging

import harness_faults


def swallow(act):
    try:
        act()
    except Exception:
        logging.getLogger("product").exception("caught")


def test_logged_assertion():
    def act():
        assert False
    swallow(act)


def test_recorded_fault():
    @harness_faults.recorded()
    def act():
        raise KeyError("slot 3")
    try:
        act()
    except KeyError:
        pass


async def test_callback_that_raises():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)


async def test_task_that_nobody_awaits():
    async def act():
        raise KeyError
    asyncio.create_task(act())
    await asyncio.sleep(0)


def test_fault_of_the_product_that_it_logs():
    def act():
        raise RuntimeError("a client went")
    swallow(act)


def test_call_that_ends_before_its_handler_begins():
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError:
        logging.getLogger("grpc._cython.cygrpc").exception("Exception not handled")


def test_fault_that_the_test_takes():
    harness_faults.record("wanted")
    assert harness_faults.take() == ["wanted"]
"""


def test_faults_behind_an_except_fail_their_tests(tmp_path: Path) -> None:
    (tmp_path / "test_swallowed.py").write_text(TESTS)
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_swallowed.py"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos/tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.findall(r"^ERROR \S+::test_(\w+)", done.stdout, re.MULTILINE) == [
        "logged_assertion",
        "recorded_fault",
        "callback_that_raises",
        "task_that_nobody_awaits",
    ], done.stdout
    assert " 7 passed, 4 errors" in done.stdout
