"""The shape of a JSON text, counted without parsing it, never finds less than a parser does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.untrusted.json_shape import Shape

TEXTS = st.text(alphabet='[]{},:"\\ab\n\u00fc', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def depth_of(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def containers_in(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + sum(map(containers_in, inner))


def entries_in(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) + sum(map(entries_in, inner))


def members_in(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return (len(inner) if isinstance(value, dict) else 0) + sum(map(members_in, inner))


@given(value=VALUES, escaped=st.booleans())
def test_the_counts_are_those_of_a_parser(value: Any, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped).encode()
    depth, containers, entries, members = depth_of(value), containers_in(value), entries_in(value), members_in(value)
    assert not Shape(entries + containers, members, containers, depth).excess(text)
    if depth:
        assert "nested too deeply" in Shape(1000, 1000, 1000, depth - 1).excess(text)
        assert "lists and objects" in Shape(1000, 1000, containers - 1, 1000).excess(text)
        assert Shape(entries - 1, 1000, 1000, 1000).excess(text)
    if members:
        assert "members" in Shape(1000, members - 1, 1000, 1000).excess(text)


@pytest.mark.parametrize("text", [b"[" * 50, b"]" * 50, b'{"a":' * 50, b"[[[" + b"{}" * 50 + b"]" * 50])
def test_brackets_without_a_partner_count_as_levels(text: bytes) -> None:
    assert "nested too deeply" in Shape(1000, 1000, 1000, 40).excess(text + b"[]" * 45)


def test_strings_are_counted_before_they_are_cut() -> None:
    assert "strings" in Shape(10, 10, 10, 10).excess(b'"",' * 22)


@pytest.mark.parametrize("text", [b"", b"null", b'"', b'"\\', b'"\\"', b"\xff\xfe", b"[1,2"])
def test_a_short_text_that_is_no_json_is_left_to_the_parser(text: bytes) -> None:
    assert not Shape(10, 10, 10, 10).excess(text)


def test_texts_that_are_parsed_together_are_counted_together() -> None:
    shape = Shape(100, 10, 8, 3)
    assert shape.excess(b"[[],[]]", b"[[],[]]") == ""
    assert shape.excess(b"[[],[]]", b'["["]', b"[[],[],[]]") == ""
    assert shape.excess(b"[[],[]]", b"[[],[],[],[],[]]") == "has 9 lists and objects; expected at most 8"
    assert shape.excess(b'{"a":1,"b":2}', b'{"c":' + b"[" * 3 + b"]" * 3 + b"}") == (
        "is nested too deeply; expected at most 3 lists and objects in each other"
    )
    assert shape.excess() == ""
