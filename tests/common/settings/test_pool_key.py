"""The pool's key: needed beyond loopback, read from the environment or a file, and shown nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.settings.config import build_parser, load
from common.settings.pool_key import PoolSettings, pool_key_of

KEY = "0123456789abcdef"


def settings(*argv: str, **environ: str) -> PoolSettings:
    return load(PoolSettings, argv, environ, known=())


@pytest.mark.parametrize(
    ("options", "is_needed"),
    [
        ({}, False),
        ({"redis_url": "redis://127.0.0.1:6379/0"}, False),
        ({"redis_url": "redis://user:password@[::1]:6379/0"}, False),
        ({"redis_url": "unix:///run/redis.sock"}, False),
        ({"host": "0.0.0.0"}, False),  # no Redis, no discovery
        ({"redis_url": "redis://redis:6379/0"}, True),
        ({"redis_url": "rediss://10.0.0.1:6379/0"}, True),
        ({"redis_url": "redis://127.0.0.1:6379/0", "host": "0.0.0.0"}, True),
    ],
)
def test_a_key_is_needed_unless_everything_is_on_loopback(options: dict[str, Any], is_needed: bool) -> None:
    if is_needed:
        with pytest.raises(InvalidConfig, match=r"QUIRE_POOL_KEY: is missing, .*openssl rand -hex 32"):
            pool_key_of(PoolSettings(**options))
    else:
        assert pool_key_of(PoolSettings(**options)) is None
    assert pool_key_of(PoolSettings(**options, pool_key=KEY)) == KEY.encode()


def test_the_key_comes_from_the_environment_or_from_a_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    for found in (settings(QUIRE_POOL_KEY=KEY), settings(QUIRE_POOL_KEY_FILE=str(tmp_path / "key"))):
        assert pool_key_of(found) == KEY.encode()
    (tmp_path / "url").write_text("redis://u:p@127.0.0.1:1/0")
    assert settings(REDIS_URL_FILE=str(tmp_path / "url")).redis_url == "redis://u:p@127.0.0.1:1/0"
    with pytest.raises(InvalidConfig, match=r"QUIRE_POOL_KEY_FILE: names .* which cannot be read"):
        settings(QUIRE_POOL_KEY_FILE=str(tmp_path / "nothing"))


def test_the_key_has_no_flag_and_no_message_shows_it() -> None:
    assert "pool-key" not in build_parser(PoolSettings).format_help()
    with pytest.raises(InvalidConfig, match="--pool-key: is not an option here"):
        settings("--pool-key", KEY)
    with pytest.raises(InvalidConfig) as caught:
        settings(QUIRE_POOL_KEY="too short")
    assert "too short" not in str(caught.value)
    assert "QUIRE_POOL_KEY: is a secret; " in str(caught.value)
    assert KEY not in repr(settings(QUIRE_POOL_KEY=KEY))
