"""``python -m sluice_router``: runs a router; see ``settings`` for the command line."""

from __future__ import annotations

import logging
import sys

import uvloop
from pydantic import ValidationError

from sluice.certificates import CertificateError
from sluice_router.observability.request_traces import TracingError
from sluice_router.server import ListenError, serve
from sluice_router.settings import parse_settings


def main() -> int:
    """Runs a router; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = parse_settings(sys.argv[1:])
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        uvloop.run(serve(settings))
    except (CertificateError, ListenError, TracingError) as error:
        print(f"sluice_router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
