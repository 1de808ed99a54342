"""Free ports: different ones, and none again while another one is left."""

import socket

import pytest

from common.process import ports
from common.process.ports import free_ports


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> range:
    """Ports that no other process of the tests picks."""
    start, step = ports.CANDIDATES.start + 1, ports.CANDIDATES.step
    monkeypatch.setattr(ports, "CANDIDATES", range(start, start + 4 * step, step))
    monkeypatch.setattr(ports, "_last_picked", {})
    return ports.CANDIDATES


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
