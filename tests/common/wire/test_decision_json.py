"""Decision records as lines of JSON: as protobuf has them, and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from common.contracts.types import Candidate, Decision, DecisionKind
from common.wire.decision_codec import decision_from_proto, decision_to_proto
from common.wire.decision_json import line_of, plain, record_of
from quire.decision.v1 import decision_pb2 as pb

CHOSEN = Candidate("w0", 0.0, (("prefill", 0.5),), figures=(("hit_blocks", 3.0),))
OUT = Candidate("w1", None, rejected="no room: 3 < 4")
WHOLE = Decision(
    "d1", DecisionKind.ROUTING, 1_764_422_443_123_456_789, "w0", "r1", (CHOSEN, OUT), ("cheapest", "näher"),
    (("load", 0.25),), "v1", "b1", (("queued", 0.0),), f"00-{'a' * 32}-{'b' * 16}-01", "acme", "w0",
)  # fmt: skip
SMALL = Decision("d2", DecisionKind.GRANT, 7, "")


def message_of(number: int, decision: Decision) -> pb.DecisionRecord:
    message = decision_to_proto(decision)
    message.sequence = number
    return message


def test_a_line_is_this_text() -> None:
    line = b'{"decision_id":"d2","kind":"grant","time_unix_nano":"7","figures":{"blocks":2.0},"sequence":"5"}\n'
    assert line_of(5, replace(SMALL, figures=(("blocks", 2.0),))) == line


@pytest.mark.parametrize("decision", [WHOLE, SMALL])
def test_a_line_is_the_json_form_of_protobuf_and_comes_back(decision: Decision) -> None:
    line, message = line_of(5, decision), message_of(5, decision)
    assert json.loads(line) == plain(message)
    assert record_of(line) == message
    assert decision_from_proto(record_of(line)) == replace(decision, traceparent="")


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_texts(value: float) -> None:
    decision = replace(SMALL, figures=(("wait", value),))
    assert b'"wait":"Infinity"' in line_of(1, decision).replace(b"-Inf", b"Inf")
    assert record_of(line_of(1, decision)) == message_of(1, decision)


def test_texts_of_clients_make_no_other_line_and_no_control_character() -> None:
    text = 'a"}\n{"kind":"reset' + "".join(map(chr, range(32)))
    line = line_of(1, replace(WHOLE, request_id=text))
    assert (line.count(b"\n"), min(line[:-1]) >= 32) == (1, True)
    assert record_of(line).request_id == text


def test_a_text_that_is_no_unicode_has_no_line() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 of json or of protobuf
        line_of(1, replace(SMALL, chosen="\udc80"))


def test_fields_of_a_newer_quire_are_passed_by() -> None:
    assert record_of(line_of(5, SMALL)[:-2] + b',"newer":{"a":[1]}}') == message_of(5, SMALL)


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"7", b"null", b'{"kind":7}', b'{"sequence":"x"}', b"\xff"])
def test_a_line_that_has_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the text is of json or of protobuf
        record_of(line)
