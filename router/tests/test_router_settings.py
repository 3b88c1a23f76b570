"""The command line, its environment fallback, and the error table."""

from __future__ import annotations

import importlib
import pkgutil
import time

import pytest
from pydantic import ValidationError

import sluice_router
from sluice_core.latency.measured_profiles import load_model_on_gpu
from sluice_core.records import EngineId, IterationShape, Role
from sluice_core.scheduling.engine_table import EngineConfig
from sluice_router import __main__ as program
from sluice_router import errors
from sluice_router.api.error_statuses import error_status_of
from sluice_router.limit_type import Limit
from sluice_router.scheduling.engines.engine_health import ITERATION_AGE_FLOOR_S, SILENCE_LIMIT_S
from sluice_router.server import make_router
from sluice_router.settings import LIMITS, parse_settings

NEEDED = ["--model", "/m", "--engines", "file:/e"]


def test_command_line_of_the_brief_is_taken():
    settings = parse_settings(
        [
            *("--host", "0.0.0.0", "--http-port", "1", "--grpc-port", "2", "--control-port", "3"),
            *("--metrics-port", "4", *NEEDED, "--plan", "/p", "--silence-limit-s", "9"),
        ],
        {},
    )
    assert (settings.http_port, settings.grpc_port, settings.control_port, settings.metrics_port) == (1, 2, 3, 4)
    assert settings.limits[SILENCE_LIMIT_S] == 9


def test_environment_fills_in_and_the_command_line_wins():
    environment = {"SLUICE_ROUTER_MODEL": "/env", "SLUICE_ROUTER_ITERATION_AGE_FLOOR_S": "10"}
    settings = parse_settings(["--engines", "file:/e"], environment)
    assert (settings.model, settings.limits[ITERATION_AGE_FLOOR_S]) == ("/env", 10)
    assert parse_settings(NEEDED, environment).model == "/m"


@pytest.mark.parametrize("arguments", [["--http-port", "70000"], ["--silence-limit-s", "0"], ["--grace-s", "x"]])
def test_value_out_of_bounds_is_refused_by_name(arguments):
    with pytest.raises(ValidationError, match=arguments[0][2:].replace("-", "_")):
        parse_settings([*NEEDED, *arguments], {})


def test_a_latency_profile_is_what_engines_start_with():
    settings = parse_settings([*NEEDED, "--latency-profile", "qwen2.5-32b@a100-80gx2"], {})
    table = make_router(settings).state.engines.table
    spec = EngineConfig(block_size_tokens=16, kv_bytes_per_token=1000, max_num_seqs=64, max_batch_tokens=8192)
    table.add(EngineId("a"), spec, role=Role.PREFILL_HEAVY, chunk_size_tokens=2048)
    shape = IterationShape(prefill_tokens=2048, num_chunks=1)
    expected_s = load_model_on_gpu("qwen2.5-32b", "a100-80g", 2).profile.estimate_shape_s(shape)
    assert table[EngineId("a")].latency.estimate_shape_s(shape) == pytest.approx(expected_s, rel=0.01)


@pytest.mark.parametrize("value", ["qwen2.5-14b@abacus", "abacus@h100", "qwen2.5-14b"])
def test_an_unknown_latency_profile_is_refused_by_name(value):
    with pytest.raises(ValidationError, match=r"latency_profile(?s:.)*known are"):
        parse_settings([*NEEDED, "--latency-profile", value], {})


def test_a_router_serves_the_model_whose_id_it_was_told():
    assert make_router(parse_settings([*NEEDED, "--model-id", "m7"], {})).state.model_id == "m7"


def test_options_out_of_bounds_end_the_program_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sluice_router", *NEEDED, "--http-port", "70000"])
    assert program.main() == 2
    assert "http_port" in capsys.readouterr().err


def test_a_model_was_created_when_its_router_began():
    begun_s = int(time.time())
    assert begun_s <= make_router(parse_settings(NEEDED, {})).model.created_s <= time.time()


def test_missing_option_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse_settings([], {})
    assert "--model" in capsys.readouterr().err


def leaves(base: type[errors.RouterError]) -> list[type[errors.RouterError]]:
    children = base.__subclasses__()
    return [leaf for child in children for leaf in leaves(child)] if children else [base]


@pytest.mark.parametrize("kind", leaves(errors.RouterError))
def test_every_error_has_one_row_in_the_table(kind):
    error = kind("why", retry_after_s=3)
    outcome = error_status_of(error)
    assert 400 <= outcome.http_status < 600
    assert error.code == kind.default_code
    assert kind("why", code="finer").code == "finer"


def test_overload_can_be_retried_and_says_so():
    for kind in leaves(errors.OverloadError):
        assert error_status_of(kind("x")).http_status in {429, 503}


def test_every_limit_is_an_option():
    names = (info.name for info in pkgutil.walk_packages(sluice_router.__path__, "sluice_router."))
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, Limit)}
    assert found == set(LIMITS)
    assert len({limit.name for limit in LIMITS}) == len(LIMITS)


def test_a_router_that_is_told_nothing_keeps_to_these_limits():
    limits = parse_settings(NEEDED, {}).limits
    assert {limit.name: limits[limit] for limit in LIMITS} == {
        "silence_limit_s": 2,
        "iteration_age_floor_s": 2,
        "iteration_age_factor": 5,
        "resume_grace_s": 0.3,
        "claim_timeout_s": 1,
        "hello_timeout_s": 10,
        "wait_limit_s": 30,
        "stream_wait_limit_s": 600,
        "max_waiting": 4096,
        "max_recoveries": 3,
        "max_deaths": 2,
        "max_moves_per_engine": 16,
        "grant_timeout_s": 2,
        "copy_timeout_s": 5,
        "pull_timeout_s": 10,
        "drain_retry_s": 0.25,
        "ring_size": 32_768,
        "num_samples": 4096,
    }


def test_a_router_that_is_told_nothing_listens_for_this_machine_alone_and_trusts_nobody():
    settings = parse_settings(NEEDED, {})
    assert (settings.host, settings.http_port, settings.grace_s, settings.share_ports) == ("127.0.0.1", 8000, 30, False)
    assert (settings.grpc_port, settings.control_port, settings.metrics_port) == (0, 0, 0)
    assert (settings.api_keys, settings.allowed_origins, settings.front_tls, settings.peer_tls) == ("", "", "", "")
    assert (settings.jwt.jwt_keys, settings.jwt.jwt_owner_claim, settings.jwt.jwt_leeway_s) == ("", "sub", 30)


@pytest.mark.parametrize(
    ("option", "bound", "is_allowed"),
    [
        ("resume-grace-s", "0", True),
        ("max-recoveries", "0", True),
        ("ring-size", "0", True),
        ("num-samples", "0", True),
        ("iteration-age-factor", "1", True),
        ("max-waiting", "1", True),
        ("max-deaths", "1", True),
        ("max-moves-per-engine", "1", True),
        ("http-port", "65535", True),
        ("grace-s", "0", True),
        ("jwt-leeway-s", "300", True),
        ("hello-timeout-s", "0", False),
        ("wait-limit-s", "0", False),
        ("claim-timeout-s", "0", False),
        ("iteration-age-factor", "0.9", False),
        ("max-waiting", "0", False),
        ("max-deaths", "0", False),
        ("jwt-leeway-s", "300.1", False),
    ],
)
def test_options_may_have_their_bounds_and_nothing_beyond(option, bound, is_allowed):
    arguments = [*NEEDED, f"--{option}", bound]
    if is_allowed:
        parse_settings(arguments, {})
        return
    with pytest.raises(ValidationError, match=option.replace("-", "_")):
        parse_settings(arguments, {})


def test_a_limit_that_no_option_changes_has_its_default():
    limits = parse_settings([*NEEDED, "--silence-limit-s", "9"], {}).limits
    changed = {limit.name: limits[limit] for limit in LIMITS if limits[limit] != limit.default}
    assert changed == {"silence_limit_s": 9.0}


def test_limits_that_count_are_whole_numbers():
    counts = {limit.name for limit in LIMITS if isinstance(parse_settings(NEEDED, {}).limits[limit], int)}
    assert counts == {
        "max_waiting",
        "max_recoveries",
        "max_deaths",
        "max_moves_per_engine",
        "ring_size",
        "num_samples",
    }
