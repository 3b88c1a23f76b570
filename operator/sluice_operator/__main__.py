"""``python -m sluice_operator``: runs the operator; see ``settings`` for the command line."""

from __future__ import annotations

import asyncio
import logging
import sys

from pydantic import ValidationError

from sluice.certificates import CertificateError
from sluice_operator.controller.manager import run_operator
from sluice_operator.kubernetes.errors import LeaseLostError
from sluice_operator.logs import set_up_logs
from sluice_operator.settings import parse_settings


def main() -> int:
    """Runs the operator; returns the exit status."""
    try:
        settings = parse_settings(sys.argv[1:])
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 2
    set_up_logs(settings.log_level)
    try:
        asyncio.run(run_operator(settings))
    except* CertificateError as errors:
        logging.getLogger(__name__).error("cannot start: %s", find_cause(errors))  # noqa: TRY400 - expected
        return_status = 2
    except* LeaseLostError as errors:
        logging.getLogger(__name__).error("exits: %s", find_cause(errors))  # noqa: TRY400 - expected, no trace
        return_status = 1
    else:
        return_status = 0
    return return_status


def find_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Finds what went wrong first: task groups in task groups say how many errors there were, and not which."""
    cause: BaseException = errors
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


if __name__ == "__main__":
    sys.exit(main())
