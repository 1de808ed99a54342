"""To which addresses a router connects when discovery names them."""

from __future__ import annotations

import pytest

from router.workers.worker_networks import LOOPBACK, PRIVATE, WorkerNetworks


@pytest.mark.parametrize(
    ("networks", "address", "is_allowed"),
    [
        (LOOPBACK, "127.0.0.1:50053", True),
        (LOOPBACK, "127.9.9.9:1", True),
        (LOOPBACK, "[::1]:50053", True),
        (LOOPBACK, "localhost:50053", True),
        (LOOPBACK, "LOCALHOST:50053", True),
        (LOOPBACK, "[::ffff:127.0.0.1]:50053", True),
        (LOOPBACK, "10.0.0.1:50053", False),
        (LOOPBACK, "0.0.0.0:50053", False),
        (LOOPBACK, "localhost.evil.example:50053", False),
        (PRIVATE, "10.0.0.1:50053", True),
        (PRIVATE, "172.31.255.255:50053", True),
        (PRIVATE, "[fd00::1]:50053", True),
        (PRIVATE, "[::ffff:10.0.0.1]:50053", True),
        (PRIVATE, "172.32.0.1:50053", False),
        (PRIVATE, "8.8.8.8:53", False),
        (PRIVATE, "169.254.169.254:80", False),
        (PRIVATE, "[::ffff:8.8.8.8]:53", False),
        (PRIVATE, "gpu-1.workers.example:50053", False),
        ((".workers.example",), "gpu-1.workers.example:50053", True),
        ((".workers.example",), "workers.example:50053", False),
        ((".workers.example",), "gpu-1.otherworkers.example:50053", False),
        (("10.1.0.0/16",), "10.1.2.3:50053", True),
        (("10.1.0.0/16",), "10.2.2.3:50053", False),
        (("10.1.2.3",), "10.1.2.3:50053", True),
    ],
)
def test_addresses_are_allowed_by_network_and_name(networks: tuple[str, ...], address: str, is_allowed: bool) -> None:
    assert (WorkerNetworks(networks).refusal(address) == "") is is_allowed


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":1", "localhost:", "localhost:0", "localhost:65536", "localhost:-1", "localhost:\u0661",
     "localhost:" + "9" * 10, "x" * 300 + ":1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    assert WorkerNetworks((*PRIVATE, ".x")).refusal(address)
