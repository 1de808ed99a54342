"""Free ports: different ones, and none again while another one is left; sockets that listen on both families."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from common.process import ports
from common.process.ports import family_of, free_ports, listener


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[range]:
    """Ports that no other process of the tests picks."""
    start, step = ports.CANDIDATES.start + 1, ports.CANDIDATES.step
    monkeypatch.setattr(ports, "CANDIDATES", range(start, start + 4 * step, step))
    monkeypatch.setattr(ports, "_last_picked", {})
    monkeypatch.setattr(ports, "_claims", {})
    yield ports.CANDIDATES
    for claim in ports._claims.values():
        os.close(claim)


def test_no_port_is_picked_again_while_another_one_is_left(candidates: range) -> None:
    assert sorted(free_ports(1)[0] for _ in candidates) == list(candidates)


def test_the_port_that_was_picked_longest_ago_comes_first_again(candidates: range) -> None:
    first, *_ = picked = [free_ports(1)[0] for _ in candidates]
    assert free_ports(1) == [first]
    assert free_ports(len(candidates)) == [*picked[1:], first]


def test_a_port_that_somebody_holds_is_passed_over(candidates: range) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", candidates[0]))
        assert sorted(free_ports(len(candidates) - 1)) == list(candidates[1:])
        with pytest.raises(OSError, match="fewer than 4 ports"):
            free_ports(len(candidates))


PICKS = """
import sys
from common.process import ports
ports.CANDIDATES = range(*map(int, sys.argv[2:]))
print(*sorted(ports.free_ports(int(sys.argv[1]))))
"""


def picked_elsewhere(count: int, candidates: range) -> list[int]:
    """Return what another process picks."""
    words = [sys.executable, "-c", PICKS, str(count)]
    words += [str(each) for each in (candidates.start, candidates.stop, candidates.step)]
    return [int(port) for port in subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()]


def test_another_process_leaves_alone_what_was_picked_here_for_a_service_that_does_not_listen_yet(
    candidates: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = free_ports(2)
    assert picked_elsewhere(2, candidates) == sorted({*candidates} - {*mine})
    monkeypatch.setattr(ports, "_CLAIMS", 1)
    (newest,) = free_ports(1)
    assert picked_elsewhere(3, candidates) == sorted({*candidates} - {newest})


def test_without_an_address_for_claims_ports_are_picked_all_the_same(
    candidates: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_CLAIMED_AT", "192.0.2.1")  # no host here has it
    assert sorted(free_ports(len(candidates))) == list(candidates)


def test_a_port_is_free_at_the_hosts_of_both_families(candidates: range) -> None:
    with socket.socket(socket.AF_INET6) as held:
        held.bind(("::1", candidates[0]))
        hosts = ("127.0.0.1", "::1")
        assert sorted(free_ports(len(candidates) - 1, hosts)) == list(candidates[1:])


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
    ],
)
def test_who_reaches_a_listener(host: str, reached: set[str]) -> None:
    with listener(host, 0) as listens:
        port = listens.getsockname()[1]
        assert {each for each in ("127.0.0.1", "::1") if connects(each, port)} == reached


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 60.0).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_name_of_ipv6_alone_is_listened_on_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *args, **kwargs: real("::1", *args, **kwargs))
    assert family_of("worker.test") == socket.AF_INET6
