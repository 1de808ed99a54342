"""Which headers name a session, how long an id may be, and what records have in place of it."""

from __future__ import annotations

import hashlib

import pytest

from common.contracts.limits import MAX_SESSION_ID_CHARS
from router.contracts.session_ids import SESSION_HEADERS, is_session_name, sent_session, session_name


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_each_header_names_a_session(header: str) -> None:
    assert sent_session({header: " talk "}.get) == "talk"


def test_the_first_header_of_the_list_counts() -> None:
    assert sent_session({each: each for each in SESSION_HEADERS}.get) == "x-session-id"
    assert sent_session({"x-session-id": " ", "session-id": "b", "x-session-affinity": "c"}.get) == "b"
    assert sent_session({"x-request-id": "a", "user": "b", "cookie": "session_id=c"}.get) == ""


def test_a_header_that_is_too_long_is_passed_over() -> None:
    most = "a" * MAX_SESSION_ID_CHARS
    assert sent_session({"x-session-id": most}.get) == most
    assert sent_session({"x-session-id": most + "a", "session_id": "b"}.get) == "b"


def test_a_name_is_a_hash_of_tenant_and_id() -> None:
    name = session_name("blue", "anna@example.org")
    assert name == hashlib.sha256(b"quire session\0blue\0anna@example.org").hexdigest()[:32]
    assert is_session_name(name)
    assert session_name("blue", "") == ""
    names = {session_name(owner, text) for owner in ("", "blue", "blu") for text in ("talk", "etalk", "\udc80")}
    assert len(names) == 9, "no two tenants share a name, and any text has one"


@pytest.mark.parametrize("text", ["", "a" * 31, "A" * 32, "g" * 32, "a" * 33])
def test_other_texts_are_no_names(text: str) -> None:
    assert not is_session_name(text)
