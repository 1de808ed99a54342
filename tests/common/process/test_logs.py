"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from common.process.logs import setup_logging

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to; afterwards the root logger is as it was."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield io.StringIO()
    root.handlers, root.level = before[0], before[1]
    logging.captureWarnings(False)


def logged(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_line_is_one_object_with_message_and_fields(stream: io.StringIO) -> None:
    setup_logging("router", stream=stream)
    logging.getLogger("router.main").info("admitted %s", "r1", extra={"request_id": "r1", "queue_seconds": 0.25})
    line = logged(stream)
    assert line.pop("ts").endswith("+00:00")
    assert line == {
        "level": "info",
        "service": "router",
        "logger": "router.main",
        "msg": "admitted r1",
        "request_id": "r1",
        "queue_seconds": 0.25,
    }


def test_a_line_names_the_current_span(stream: io.StringIO) -> None:
    setup_logging("router", stream=stream)
    with TracerProvider().get_tracer("test").start_as_current_span("route") as span:
        logging.getLogger("x").warning("slow")
    context = span.get_span_context()
    assert logged(stream)["trace_id"] == f"{context.trace_id:032x}"
    assert logged(stream)["span_id"] == f"{context.span_id:016x}"


def test_a_traceparent_field_names_the_trace(stream: io.StringIO) -> None:
    setup_logging("gpuworker", stream=stream)
    logging.getLogger("x").info("preempted", extra={"traceparent": TRACEPARENT})
    line = logged(stream)
    assert (line["trace_id"], line["span_id"]) == ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    assert "traceparent" not in line


@pytest.mark.parametrize("form", ["json", "text"])
def test_text_of_a_request_shows_only_its_length(stream: io.StringIO, form: Any) -> None:
    setup_logging("router", form=form, stream=stream)
    logging.getLogger("x").info("refused", extra={"prompt": "my secret", "token_ids": [3, 1, 4]})
    assert "secret" not in stream.getvalue()
    assert "<9>" in stream.getvalue()
    assert "<3>" in stream.getvalue()


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    setup_logging("router", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("x").exception("failed")
    assert logged(stream)["exc"].endswith("ValueError: broken")


def test_a_line_for_people_is_short(stream: io.StringIO) -> None:
    setup_logging("router", form="text", stream=stream)
    logging.getLogger("x").info("admitted", extra={"request_id": "r1"})
    assert stream.getvalue()[12:] == " info    router    admitted  request_id=r1\n"


def test_a_bare_line_leaves_clock_and_service_to_the_supervisor(stream: io.StringIO) -> None:
    setup_logging("router", form="bare", stream=stream)
    logging.getLogger("x").info("admitted", extra={"request_id": "r1"})
    logging.getLogger("x").warning("late")
    assert stream.getvalue() == "admitted  request_id=r1\nwarning: late\n"


@pytest.mark.parametrize("form", ["json", "text", "bare"])
@pytest.mark.parametrize("end", ["\n", "\r", "\x0b", "\x85", "\u2028", "\u2029"])
def test_a_line_break_in_a_value_starts_no_line(stream: io.StringIO, form: Any, end: str) -> None:
    setup_logging("router", form=form, stream=stream)
    logging.getLogger("x").info("worker %s is gone", f"w{end}error: forged", extra={"address": f"a{end}forged"})
    (line,) = stream.getvalue().splitlines()
    assert "worker w" in line


@pytest.mark.parametrize("form", ["json", "text", "bare"])
def test_a_terminal_is_not_steered_by_a_value(stream: io.StringIO, form: Any) -> None:
    setup_logging("router", form=form, stream=stream)
    logging.getLogger("x").info("\x1b[2J\x9b2J\u202e%s", "\x7f", extra={"reason": "\x1b]0;title\x07"})
    assert not {character for character in stream.getvalue() if not character.isprintable()} - {"\n"}


@pytest.mark.parametrize("form", ["text", "bare"])
def test_the_lines_of_a_traceback_are_marked(stream: io.StringIO, form: Any) -> None:
    setup_logging("router", form=form, stream=stream)
    try:
        raise ValueError("broken\nerror: forged")
    except ValueError:
        logging.getLogger("x").exception("failed")
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("failed")
    assert {line[:6] for line in others} == {"    | "}
    assert others[-1] == "    | error: forged"


@pytest.mark.parametrize("form", ["json", "text", "bare"])
def test_a_password_in_a_url_is_hidden(stream: io.StringIO, form: Any) -> None:
    setup_logging("router", form=form, stream=stream)
    logging.getLogger("x").info("Redis at %s", "redis://:secret@host:1", extra={"url": "rediss://u:secret@host"})
    assert "secret" not in stream.getvalue()
    assert "redis://***@host:1" in stream.getvalue()


def test_lines_below_the_level_are_left_out(stream: io.StringIO) -> None:
    setup_logging("router", level="warning", stream=stream)
    logging.getLogger("x").info("chatter")
    assert stream.getvalue() == ""
