"""Variables of Kubernetes' service links: they stand beside options of the same names, and are none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from common.contracts.errors import InvalidConfig
from common.process.python import module_command
from common.settings.config import load
from common.settings.service_links import in_words, service_links
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings


def links_of(service: str, *ports: int) -> dict[str, str]:
    """Return what Kubernetes sets for a Service with these ports, the first one named."""
    first = ports[0]
    found = {
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": str(first),
        f"{service}_SERVICE_PORT_HTTP_API": str(first),
        f"{service}_PORT": f"tcp://10.0.0.7:{first}",
    }
    for port in ports:
        found |= {
            f"{service}_PORT_{port}_TCP": f"tcp://10.0.0.7:{port}",
            f"{service}_PORT_{port}_TCP_PROTO": "tcp",
            f"{service}_PORT_{port}_TCP_PORT": str(port),
            f"{service}_PORT_{port}_TCP_ADDR": "10.0.0.7",
        }
    return found


@pytest.mark.parametrize("service", ["QUIRE", "QUIRE_ROUTER", "QUIRE_KVMANAGER", "QUIRE_GRPC", "QUIRE_PORT"])
def test_links_are_no_options(service: str) -> None:
    links = links_of(service, 8000, 50051)
    assert service_links(links, "QUIRE_") == links.keys()
    settings = load(RouterSettings, ("--model", "."), {**links, "QUIRE_BLOCK_SIZE": "32"})
    assert (settings.port, settings.block_size) == (8000, 32)


def test_an_option_wins_where_a_link_has_its_name() -> None:
    """What a pod names in its `env` stands in place of the link; the other links of that Service stay."""
    links = links_of("QUIRE_ROUTER", 8000) | {"QUIRE_ROUTER_PORT": "9000"}
    assert load(RouterSettings, ("--model", "."), links).port == 9000
    assert load(KvManagerSettings, (), links).port == 50052


def test_what_only_looks_like_a_link_is_refused_as_before() -> None:
    for environ in (
        {"QUIRE_ROUTER_PORT": "tcp://"},
        {"QUIRE_ROUTER_SERVICE_HOST": "10.0.0.7"},
        {"QUIRE_MODEL_NAME_X": "tcp://a:1"},
    ):
        with pytest.raises(InvalidConfig):
            load(RouterSettings, ("--model", "."), environ)
    assert service_links({"OTHER_PORT": "tcp://10.0.0.7:1"}, "QUIRE_") == frozenset()


def test_one_line_names_some() -> None:
    line = in_words(service_links(links_of("QUIRE_ROUTER", 1), "QUIRE_"))
    assert "QUIRE_ROUTER_PORT, QUIRE_ROUTER_PORT_1_TCP, QUIRE_ROUTER_PORT_1_TCP_ADDR and 5 more (enable" in line


def test_a_service_says_so_once(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environ |= links_of("QUIRE_KVMANAGER", 50052)
    command = module_command("kvmanager", "--port", "0", "--metrics-port", "0", "--log-format", "bare")
    with subprocess.Popen(
        command, env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or "READY" not in lines[-1]:
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        process.terminate()
        lines += process.stdout.readlines()
    assert sum("Kubernetes' service links" in line for line in lines) == 1
