"""URLs of Redis: what each names, and what is wrong with others, in words without a password."""

from __future__ import annotations

import pytest

from common.addresses.host_port import SentinelUrl, checked_redis_url, redis_addresses, sentinel_url, without_login


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("redis://redis:6380/1", (("redis", 6380),)),
        ("redis://user:secret@redis", (("redis", 6379),)),
        ("rediss://[::1]:6380/0", (("::1", 6380),)),
        ("unix:///run/redis.sock", ()),
        ("redis+sentinel://a,b:26380,[::1]:1/quire", (("a", 26379), ("b", 26380), ("::1", 1))),
    ],
)
def test_the_addresses_of_a_url(url: str, addresses: tuple[tuple[str, int], ...]) -> None:
    assert checked_redis_url(url) == url
    assert redis_addresses(url) == addresses


def test_every_part_of_a_url_of_sentinels() -> None:
    url = "rediss+sentinel://user:p%40ss@a:1,b/quire%20x/3?sentinel_username=s&sentinel_password=t%26u"
    assert sentinel_url(url) == SentinelUrl((("a", 1), ("b", 26379)), "quire x", 3, True, "user", "p@ss", "s", "t&u")
    assert sentinel_url("redis+sentinel://:pw@a/quire") == SentinelUrl((("a", 26379),), "quire", password="pw")
    assert without_login(url) == "rediss+sentinel://a:1,b/quire%20x/3"
    assert "p@ss" not in repr(sentinel_url(url))


def test_no_redis_is_a_url_too() -> None:
    assert checked_redis_url("") == ""


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://redis:6379", "expected redis://HOST:PORT"),
        ("redis:6379", "expected redis://HOST:PORT"),
        ("redis+cluster://a:1,b:2", "names a Redis Cluster, whose keys lie on several servers; expected redis://"),
        ("redis://a:1,b:2/0", "names several servers; expected one, or redis+sentinel://"),
        ("redis+sentinel://a:1", "names no service; expected redis+sentinel://"),
        ("redis+sentinel://a:1/quire/x", "has no number as its database"),
        ("redis+sentinel://user:secret@a:1,b:port/quire", "has 'b:port' among the Sentinels; expected HOST:PORT"),
        ("redis+sentinel://a,,b/quire", "has '' among the Sentinels"),
        ("redis+sentinel://a/quire?password=secret", "has password after the ?; expected sentinel_password or "),
    ],
)
def test_what_is_wrong_is_said_without_a_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        checked_redis_url(url)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
