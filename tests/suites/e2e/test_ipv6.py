"""Suites on IPv6: each port answers at ::1, and for `::` at 127.0.0.1 too."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.up_harness import READY_SECONDS, Up, quire

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SIMULATED = ("--simulate", "--insecure")


def asked(url: str) -> int:
    """Return the status of a page."""
    with DIRECT.open(url, timeout=READY_SECONDS) as answer:
        return int(answer.status)


def metrics_ports(lines: Sequence[str]) -> set[str]:
    """Return the ports of /metrics that services name when they are ready: those of router and manager."""
    found = {each[1] for line in lines if (each := re.search(r"metrics on (?:\S*:)?(\d+)", line))}
    assert len(found) == 2, lines
    return found


def completion(host: str, port: int) -> int:
    """Ask over HTTP; return the tokens of the answer."""
    body = json.dumps({"prompt": "a b c", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://{host}:{port}/v1/completions", body, {"content-type": "application/json"})
    with DIRECT.open(request, timeout=READY_SECONDS) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("::1", ("[::1]",)),
        pytest.param("[::1]", ("[::1]",), marks=pytest.mark.exhaustive),
        pytest.param("::", ("[::1]", "127.0.0.1"), marks=pytest.mark.exhaustive),
        ("[::]", ("[::1]", "127.0.0.1")),
    ],
)
def test_a_suite_on_ipv6_serves(host: str, reached: tuple[str, ...], tmp_path: Path) -> None:
    up = Up(tmp_path, *SIMULATED, "--host", host, "--admin-host", host, cwd=tmp_path)
    try:
        up.until("quire     ready")
        grpc_port, admin_port = (each.rpartition(":")[2] for each in (up.address, up.admin_address))
        for way in reached:
            assert completion(way, up.port) == 2
            for words in (
                ("generate", "--address", f"{way}:{grpc_port}", "--max-tokens", "2", "a b c"),
                ("status", "--admin-address", f"{way}:{admin_port}", "--state-dir", str(tmp_path)),
            ):
                done = quire(*words, cwd=tmp_path)
                assert done.returncode == 0, done.stderr
            for port in metrics_ports(up.lines):
                assert asked(f"http://{way}:{port}/health") == 200
    finally:
        up.close()
