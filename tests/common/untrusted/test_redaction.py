"""User names and passwords of URLs are hidden, whatever stands around them."""

from __future__ import annotations

import pytest

from common.untrusted.rare_lines import redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:pass@host:1/0", "redis://***@host:1/0"),
        ("at rediss://user:p%40s/s@host, again", "at rediss://***@host, again"),
        ("'redis://u:a@b@host'", "'redis://***@host'"),
        ("redis://host:1 is down; write to me@home", "redis://host:1 is down; write to me@home"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_what_stands_before_the_at_of_a_url_is_hidden(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_long_text_full_of_urls_takes_no_time() -> None:
    assert redacted("x://" * 100_000 + " a@b").endswith("@b")
