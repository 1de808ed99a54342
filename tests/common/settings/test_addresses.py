"""HOST:PORT of hosts of both families."""

from __future__ import annotations

import pytest

from common.settings.addresses import bare_host, joined_address


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:8000"),
        ("worker.example", "worker.example:8000"),
        ("::1", "[::1]:8000"),
        ("[::1]", "[::1]:8000"),
        ("::", "[::]:8000"),
        ("fe80::1%eth0", "[fe80::1%eth0]:8000"),
        ("", ":8000"),
    ],
)
def test_a_host_and_a_port_are_joined(host: str, address: str) -> None:
    assert joined_address(host, 8000) == address


def test_a_host_without_brackets() -> None:
    assert [bare_host(each) for each in ("[::]", "::", "localhost")] == ["::", "::", "localhost"]
