"""Structured logs: one JSON object a line, with the request's id and the replica's name."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

LOGGER: Final = "dspark.serving"

_log = logging.getLogger(LOGGER)


def event(name: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log what happened; `fields` are JSON values. Prompts and outputs are never among them."""
    _log.log(level, name, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """time (UTC), level, event, and the event's own fields."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "replica": self._replica,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def to_stderr(replica: str) -> None:
    """Write the service's events to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(replica))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False
