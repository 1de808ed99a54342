"""Which address a service gives to others."""

from __future__ import annotations

import asyncio
import socket

import pytest

from common.process import advertise
from common.process.advertise import reachable_address


async def test_a_host_that_was_named_is_the_address() -> None:
    assert await reachable_address("10.1.2.3", 50053, "manager.invalid:50052") == "10.1.2.3:50053"


async def test_for_every_address_it_is_the_one_on_the_way_to_the_manager() -> None:
    assert await reachable_address("0.0.0.0", 50053, "127.0.0.1:50052") == "127.0.0.1:50053"


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
async def test_an_address_of_version_6_is_bracketed() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("::1", 50052))
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert await reachable_address("[::]", 50053, "[::1]:50052") == "[::1]:50053"


async def test_it_waits_for_the_managers_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two look-ups fail as they do while the manager's container is down; the third finds it."""
    failures = [socket.gaierror(-2, "Name or service not known"), socket.gaierror(-2, "Name or service not known")]

    def resolve(host: str, port: int, **_: object) -> list[object]:
        if failures:
            raise failures.pop()
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(advertise, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with asyncio.timeout(60.0):
        assert await reachable_address("0.0.0.0", 7, "kvmanager:50052") == "127.0.0.1:7"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
