"""HOST:PORT of hosts of both families."""

from __future__ import annotations

import pytest

from common.addresses.host_port import bare_host, joined_address
from common.settings.options import ServiceSettings, checked_address


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


@pytest.mark.parametrize("address", ["127.0.0.1:1", "worker:1", "[::1]:1", "[::]:65535", "[fe80::1%eth0]:1"])
def test_an_option_takes_an_address_of_each_family(address: str) -> None:
    assert checked_address(address) == address


@pytest.mark.parametrize("address", ["::1:50051", "::1", "[::1]", "[worker]:1", "[::1:1", "wor]ker:1", "[::1]:0"])
def test_an_ipv6_address_without_its_brackets_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, with \[\.\.\] around an IPv6 address"):
        checked_address(address)


@pytest.mark.parametrize(("given", "host"), [("[::]", "::"), ("::1", "::1"), ("localhost", "localhost")])
def test_a_host_to_listen_on_may_have_brackets(given: str, host: str) -> None:
    assert ServiceSettings(host=given, insecure=True).host == host
