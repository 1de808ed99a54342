"""Ports that a suite picks itself: another process may take one before its owner listens there."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from cli.demo_model import CHECKPOINT
from cli.suite.ports import picks_ports, with_picked_ports
from cli.suite.programs import StackOptions
from cli.suite.stack import Stack, free_ports, redis_words
from common.contracts.errors import Unavailable
from common.process import local_redis

TAKEN = "another process took a port that was picked; trying others"


def options(tmp_path: Path, **ports: Any) -> StackOptions:
    """Return a suite without TLS and without a model, whose ports are picked unless they are given."""
    chosen: dict[str, Any] = {"grpc_port": 0, "port": 0, "manager_port": 0, "worker_ports": (0,), **ports}
    flags = ("--simulate", "--device", "cpu")
    return StackOptions(model=CHECKPOINT, state_dir=tmp_path, worker_flags=flags, ready_seconds=120.0, **chosen)


def test_a_port_of_0_is_a_free_one_and_the_others_stay(tmp_path: Path) -> None:
    given = options(tmp_path, worker_ports=(0, 7, 0), own_ports=(0, 8))
    picked = with_picked_ports(given)
    found = [picked.grpc_port, picked.port, picked.admin_port, picked.admin_http_port, picked.manager_port]
    found += [picked.worker_ports[0], picked.worker_ports[2], picked.own_ports[0]]
    assert len({*found}) == len(found)
    assert all(port and port > 1023 for port in found)
    assert (picked.worker_ports[1], picked.own_ports[1]) == (7, 8)
    assert picks_ports(given)
    assert not picks_ports(picked)


def test_ports_of_the_admin_plane_follow_a_port_that_was_chosen(tmp_path: Path) -> None:
    picked = with_picked_ports(options(tmp_path, grpc_port=7000))
    assert (picked.grpc_port, picked.admin_port, picked.admin_http_port) == (7000, None, None)


@pytest.mark.parametrize("name", ["manager_port", "port", "admin_port"])
async def test_a_port_that_was_taken_in_between_is_picked_again(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    stack = Stack(options(tmp_path), lambda _, line: lines.append(line))
    taken = getattr(stack.options, name)
    with socket.create_server(("127.0.0.1", taken)):
        async with stack:
            assert getattr(stack.options, name) != taken
            assert lines.count(TAKEN) == 1
            status = f"HTTP on 127.0.0.1:{stack.options.port}"
            assert any(status in line for line in lines)


async def test_the_port_of_a_suites_own_redis_is_picked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        picks = iter([server.getsockname()[1], *free_ports(1)])
        monkeypatch.setattr(local_redis, "_free_port", lambda: next(picks))
        async with Stack(options(tmp_path), lambda _, line: lines.append(line)) as stack:
            assert stack.redis_url.startswith("redis://")
    assert lines.count(TAKEN) == 1


async def test_a_port_that_was_chosen_is_not_changed(tmp_path: Path) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        free = dict(zip(("grpc_port", "port", "admin_port", "admin_http_port"), free_ports(4), strict=True))
        chosen = options(tmp_path, manager_port=taken, worker_ports=tuple(free_ports(1)), **free)
        stack = Stack(chosen, lambda _, line: lines.append(line))
        with pytest.raises(Unavailable, match=f"kvmanager cannot run:\n.*cannot start:\n.*127.0.0.1:{taken}; expected"):
            await stack.__aenter__()
    assert TAKEN not in lines


def test_a_redis_that_does_not_answer_is_not_called_ready() -> None:
    (port,) = free_ports(1)
    words = "(connection refused): prompts are routed without the prefix index until it does"
    assert redis_words(f"redis://user:secret@127.0.0.1:{port}/0") == f"nothing answers at 127.0.0.1:{port}/0 {words}"
    assert redis_words("") == "none; flags name the workers"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        assert redis_words(address) == f"ready at {address}"
