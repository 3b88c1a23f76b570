"""Logs as JSON lines, each with the object that it is about, if any."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

from pythonjsonlogger.json import JsonFormatter

# The cluster that the present task works on.
current_object: ContextVar[str] = ContextVar("current_object", default="")


class ObjectFilter(logging.Filter):
    """Adds the object's name to records that do not carry one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter.filter``."""
        if not hasattr(record, "object"):
            record.object = current_object.get()
        return True


def make_formatter() -> logging.Formatter:
    """Makes the formatter."""
    names = {"asctime": "time", "levelname": "level", "name": "logger"}
    return JsonFormatter("%(asctime)s %(levelname)s %(name)s %(object)s %(message)s", rename_fields=names)


def set_up_logs(level: str) -> None:
    """Sends all logs to the standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter())
    handler.addFilter(ObjectFilter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf logs every event that it passes on.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLevelName(level)))
