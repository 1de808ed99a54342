"""Names of this machine: those that no foreign DNS server gives away, and those that somebody allows."""

from __future__ import annotations

import socket

import pytest

from common.untrusted.host_names import is_own_name


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "127.0.0.1", "10.1.2.3:8000", "[::1]", "[fe80::1]:8000", "gpu-box:8000"),
        *("a.localhost", "host.docker.internal:80", "router.quire.svc.cluster.local"),
        socket.gethostname(),
    ],
)
def test_the_machine_is_called_by_names_of_its_own(host: str) -> None:
    assert is_own_name(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", ":8000", "rebound.example", "rebound.example:8000", "127.0.0.1.rebound.example", "localhost.example"),
        *("internal.example", "1.2.3", "[rebound.example]", "[::1].rebound.example", "rebound.example."),
        *("printer.local", "router.corp.internal", "rebound.example:80:localhost"),
    ],
)
def test_a_name_of_the_internet_is_not(host: str) -> None:
    assert not is_own_name(host)


def test_a_name_that_is_allowed_is_one() -> None:
    assert is_own_name("LLM.example:443", ("llm.example",))
    assert not is_own_name("other.example", ("llm.example",))
