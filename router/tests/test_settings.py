"""The command line, its environment fallback, and the error table."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sluice_router import errors
from sluice_router.settings import parse_settings

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
    assert settings.limits.silence_limit_s == 9


def test_environment_fills_in_and_the_command_line_wins():
    environment = {"SLUICE_ROUTER_MODEL": "/env", "SLUICE_ROUTER_ITERATION_AGE_FLOOR_S": "10"}
    settings = parse_settings(["--engines", "file:/e"], environment)
    assert (settings.model, settings.limits.iteration_age_floor_s) == ("/env", 10)
    assert parse_settings(NEEDED, environment).model == "/m"


@pytest.mark.parametrize("arguments", [["--http-port", "70000"], ["--silence-limit-s", "0"], ["--grace-s", "x"]])
def test_value_out_of_bounds_is_refused_by_name(arguments):
    with pytest.raises(ValidationError, match=arguments[0][2:].replace("-", "_")):
        parse_settings([*NEEDED, *arguments], {})


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
    outcome = errors.outcome_of(error)
    assert 400 <= outcome.http_status < 600
    assert error.code == outcome.code
    assert kind("why", code="finer").code == "finer"


def test_overload_can_be_retried_and_says_so():
    for kind in leaves(errors.OverloadError):
        assert errors.outcome_of(kind("x")).http_status in {429, 503}
