"""Logging of a process: one line per event on stderr, as text for people or JSON for machines."""

import json
import logging
import sys
from datetime import UTC, datetime

# Attributes of every LogRecord; whatever else a record has came in through `extra` and is printed too, but for what a
# library notes for itself (Ray: `_ray_timestamp_ns`, in every record of a process that has imported it).
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if not (name in _STANDARD or name[0] == "_")}


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`2026-01-01T00:00:00.000Z INFO prefill engine.loop: message key=value`, then the traceback if there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{_timestamp(record)} {record.levelname} {self._process} {record.name}: {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, process, logger, message, the extras and, if there is one, exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


class GoneConnections(logging.Filter):
    """What gRPC calls an error, with a traceback, when a connection breaks before its RPC is answered: an info line."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("grpc.") and "ExecuteBatchError" in (message := record.getMessage()):
            record.msg, record.args, record.exc_info = (
                f"a connection went away in the middle of its RPC: {message}",
                (),
                None,
            )
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def setup_logging(process: str, *, level: str = "info", log_format: str = "text") -> None:
    """Points the root logger at stderr. `process` names the process in each line ("router", "prefill")."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    handler.addFilter(GoneConnections())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Their debug lines drown ours.
    for name in ("asyncio", "grpc", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(max(logging.INFO, root.level))
