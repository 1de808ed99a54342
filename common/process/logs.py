"""Log lines: one JSON object each for machines, or short lines for people; both with the ids of their trace.

The message says what happened, `extra` fields say to what:  log.info("admitted", extra={"request_id": id}). A field
`traceparent` names the trace where the current span does not. Prompt and output text is never logged: fields that would
hold it show only their length. Passwords of URLs are hidden. Control characters are escaped. Ids and reasons may come
from peers, and a newline in one of them would start a line that looks like ours.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TextIO

from common.untrusted.rare_lines import redacted

# The attributes of every record; all others came by `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Characters that end a line, move the cursor or turn the direction of text, somewhere.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
# A traceback has several lines; the mark distinguishes them from lines of records.
_INSET: Final = "    | "
_TEXT_FIELDS: Final = frozenset({"prompt", "text", "messages", "content", "token_ids", "tokens", "output", "stop"})
_NOISY: Final = {
    "httpx": "WARNING",
    "httpcore": "WARNING",
    "uvicorn.access": "WARNING",
    "asyncio": "WARNING",
    "grpc": "INFO",  # below this level grpc logs every event loop again and again
}


def setup_logging(
    service: str, level: str = "info", form: Literal["json", "text", "bare"] = "json", stream: TextIO | None = None
) -> None:
    """Send every log line of the process to `stream` (default: stderr), and Python's warnings too.

    "bare" is for a supervisor that adds the time and the service's name to each line itself.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    formatters = {"json": JsonFormatter, "text": TextFormatter, "bare": BareFormatter}
    handler.setFormatter(formatters[form](service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name, least in _NOISY.items():
        logging.getLogger(name).setLevel(least)


class JsonFormatter(logging.Formatter):
    """One object a line: ts (UTC, ISO 8601), level, service, logger, msg, trace_id and span_id, fields, exc."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; values that JSON cannot represent are shown as text."""
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "msg": record.getMessage(),
            **trace_ids(record),
            **fields_of(record),
        }
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        text = json.dumps(line, default=str, ensure_ascii=False)
        return redacted(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


class TextFormatter(logging.Formatter):
    """`12:00:01.123 info    router  admitted  request_id=r1 trace_id=...`"""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it where there is one."""
        head = self._head(record)
        fields = {**fields_of(record), **{key: value for key, value in trace_ids(record).items() if key == "trace_id"}}
        line = "  ".join([head, " ".join(f"{key}={value}" for key, value in fields.items())]).rstrip()
        lines = [escaped(line)]
        if record.exc_info:
            lines += [_INSET + escaped(each) for each in self.formatException(record.exc_info).split("\n")]
        return redacted("\n".join(lines))

    def _head(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        return f"{clock} {record.levelname.lower():7} {self._service:9} {record.getMessage()}"


class BareFormatter(TextFormatter):
    """`admitted  request_id=r1 trace_id=...`, with the level in front where it is not info."""

    def _head(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{level}{record.getMessage()}"


def escaped(text: str) -> str:
    """Return a text as one line: control characters become escapes such as \\n and \\x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of a record, text of requests replaced by its length."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD and key != "traceparent"}
    return {key: _length(value) if key in _TEXT_FIELDS else value for key, value in extra.items()}


def trace_ids(record: logging.LogRecord) -> Mapping[str, str]:
    """Return trace_id and span_id of the record's `traceparent`, else of the current span; nothing without either."""
    parts = str(getattr(record, "traceparent", "")).split("-")
    if len(parts) == 4:
        return {"trace_id": parts[1], "span_id": parts[2]}
    tracing = sys.modules.get("opentelemetry.trace")  # a log line alone does not justify the import
    if tracing is None:
        return {}
    context = tracing.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _length(value: object) -> object:
    return f"<{len(value)}>" if isinstance(value, str | bytes | list | tuple | dict) else value
