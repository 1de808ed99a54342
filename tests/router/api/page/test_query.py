"""Parameters of a request for data: bounds, and what an error names."""

from __future__ import annotations

import pytest

from common.contracts.errors import InvalidRequest
from router.api.page.query import Query


def test_parameters_are_read() -> None:
    query = Query("id=a%20b&limit=7&empty=")
    query.allow(("id", "limit", "empty"))
    assert (query.text("id"), query.number("limit", 1, 10), query.text("empty"), query.text("other")) == (
        "a b",
        7,
        "",
        "",
    )
    assert query.number("empty", 3, 10) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("&".join(f"a{number}=1" for number in range(17)), "at most 16 parameters"),
        ("a=%ff", "in UTF-8"),
        ("a=1&a=2", "names a parameter twice"),
        ("a=" + "x" * 5000, "expected at most 4096"),
    ],
)
def test_what_is_no_query_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Query(text)


def test_an_unknown_parameter_is_named_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequest, match="colour: is unknown here; expected id, limit"):
        Query("colour=red").allow(("limit", "id"))


@pytest.mark.parametrize("value", ["-1", "11", "1.5", "x", "٣", "1" * 30])
def test_a_number_out_of_its_bounds_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="expected a number from 0 to 10"):
        Query(f"limit={value}").number("limit", 1, 10)


def test_a_choice_is_one_of_those_that_there_are() -> None:
    assert Query("").choice("service", ("router", "kvmanager")) == "router"
    with pytest.raises(InvalidRequest, match="expected one of router, kvmanager"):
        Query("service=redis").choice("service", ("router", "kvmanager"))


def test_what_is_needed_is_named() -> None:
    with pytest.raises(InvalidRequest, match="worker: is missing"):
        Query("worker=").needed("worker")
