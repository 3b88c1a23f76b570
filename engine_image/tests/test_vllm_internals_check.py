# ruff: noqa: PLC0415  (vLLM takes nine seconds to import: only tests that start engines pay them)
"""An unsupported vLLM, NIXL, model or setting is refused; the message names the differences."""

from __future__ import annotations

import inspect
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import engine_harness
import pytest

from sluice_engine.errors import ModelRefusedError, UnsupportedVllmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_harness import Engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    engine_harness.import_vllm()


@pytest.fixture
def changed() -> Iterator[Callable[[Any, str, Any], None]]:
    """Changes attributes of vLLM or NIXL, and puts them back."""
    before: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, inspect.getattr_static(owner, name)))
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    yield change
    for owner, name, value in reversed(before):
        setattr(owner, name, value)


def test_the_pinned_versions_pass() -> None:
    from sluice_engine import vllm_internals_check

    vllm_internals_check.check_installed()


def test_other_signature_is_named(changed: Callable[[Any, str, Any], None]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from sluice_engine import vllm_internals_check

    changed(Scheduler, "_free_request", lambda self, request: None)
    with pytest.raises(UnsupportedVllmError, match=r"Scheduler\._free_request takes \(self, request\), expected"):
        vllm_internals_check.check_installed()


def test_missing_attribute_is_named(changed: Callable[[Any, str, Any], None]) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from sluice_engine import vllm_internals_check

    def schedule(self: Any, throttle_prefills: Any = None) -> None:
        raise NotImplementedError

    changed(Scheduler, "schedule", schedule)
    with pytest.raises(
        UnsupportedVllmError,
        match=r"Scheduler\.schedule has no 'self\._reserve_prefill_lookahead\(' any more",
    ):
        vllm_internals_check.check_installed()


def test_nixl_without_the_pause_is_named(changed: Callable[[Any, str, Any], None]) -> None:
    from sluice_engine import vllm_internals_check
    from sluice_engine.kv_transfer import nixl_progress

    changed(nixl_progress.load_bindings(), "nixlAgentConfig", SimpleNamespace)
    with pytest.raises(UnsupportedVllmError, match=r"nixlAgentConfig\.pthrDelay is missing"):
        vllm_internals_check.check_installed()


def make_scheduler(**changes: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specification = object.__new__(FullAttentionSpec)
    scheduler = {
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=specification)]),
        "policy": SimpleNamespace(value="priority"),
        "connector": object(),
        "recompute_kv_load_failures": True,
        "vllm_config": SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"), use_v2_model_runner=False, speculative_config=None
        ),
    }
    return SimpleNamespace(**(scheduler | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": SimpleNamespace(value="fcfs")}, "scheduling policy is 'fcfs'"),
        ({"connector": None}, "no KV connector"),
        ({"recompute_kv_load_failures": False}, "must be 'recompute'"),
        (
            {
                "vllm_config": SimpleNamespace(
                    device_config=SimpleNamespace(device_type="cuda"),
                    use_v2_model_runner=False,
                    speculative_config=None,
                )
            },
            "V2 model runner is required",
        ),
    ],
)
def test_unsupported_setting_is_named(changes: dict[str, Any], message: str) -> None:
    from sluice_engine import vllm_internals_check

    vllm_internals_check.check_scheduler(make_scheduler())
    with pytest.raises(UnsupportedVllmError, match=message):
        vllm_internals_check.check_scheduler(make_scheduler(**changes))


def test_another_kv_cache_than_one_of_full_attention_is_a_refusal_of_the_model(monkeypatch, tmp_path: Path) -> None:
    from vllm.v1.core import kv_cache_utils

    from sluice_engine import core_refusal, vllm_internals_check

    with pytest.raises(ModelRefusedError, match=r"groups \[\]; models with full attention"):
        vllm_internals_check.check_scheduler(make_scheduler(kv_cache_config=SimpleNamespace(kv_cache_groups=[])))
    # The plugin finds it before vLLM's connectors do, in our engines alone.
    config = SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False))
    monkeypatch.delenv(core_refusal.VARIABLE, raising=False)
    assert kv_cache_utils.get_kv_cache_groups(config, {}) == []
    monkeypatch.setenv(core_refusal.VARIABLE, "")
    core_refusal.prepare(tmp_path)
    assert core_refusal.read() == ""
    with pytest.raises(ModelRefusedError):
        kv_cache_utils.get_kv_cache_groups(config, {})
    assert core_refusal.read().startswith("the model's KV cache has the groups []")


def test_replay_generator_finds_its_place_by_counting_tokens() -> None:
    import torch

    from sluice_engine.kv_transfer.output_replay import ReplayGenerator

    def draw(generator: torch.Generator) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())

    plain = torch.Generator().manual_seed(5)
    draws = [draw(plain) for _ in range(8)]
    state = SimpleNamespace(output_token_ids=[1, 2, 3])
    generator = ReplayGenerator(5, state)
    assert draw(generator) == draws[3]
    # A discarded sample: its draw is taken back.
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) == draws[3]
    state.output_token_ids.append(4)
    assert draw(generator) == draws[4]


def test_process_dies_with_its_parent() -> None:
    from sluice_engine.child_processes import die_with_parent

    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        child = os.fork()
        if child == 0:
            die_with_parent()
            os.write(writer, str(os.getpid()).encode())
            signal.pause()
        signal.pause()
    os.close(writer)
    os.read(reader, 16)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    # The pipe closes when its last holder, the child, is gone.
    assert os.read(reader, 16) == b""
    os.close(reader)


def test_engines_may_use_every_core_of_the_machine(pair: tuple[Engine, Engine]) -> None:
    threads = [thread.name for engine in pair for thread in Path(f"/proc/{engine.pid}/task").iterdir()]
    assert {frozenset(os.sched_getaffinity(int(thread))) for thread in threads} == {frozenset(os.sched_getaffinity(0))}


def test_idle_engine_costs_next_to_no_cpu(pair: tuple[Engine, Engine]) -> None:
    """NIXL's progress thread would burn most of a core."""

    def read_cpu_s() -> float:
        with open(f"/proc/{pair[0].pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, began_s = read_cpu_s(), time.monotonic()
    time.sleep(1.5)
    assert (read_cpu_s() - before) / (time.monotonic() - began_s) < 0.15
