"""Where peers reach a worker: its own host, the port that it listens at, or what an operator says."""

from __future__ import annotations

import socket

import pytest

from common.contracts.errors import InvalidConfig
from gpuworker.config import GpuWorkerSettings
from gpuworker.plane.data_port import DataPort
from tests.support.gpuworker.nixl import use_double


def opened(address: str, **options: object) -> DataPort:
    settings = {"model": "m", "host_memory": "1GiB", "data_port": 0, "host": "127.0.0.1", **options}
    return DataPort(GpuWorkerSettings.model_validate(settings), None, address)


@pytest.mark.parametrize(
    ("address", "host"), [("127.0.0.1:50053", "127.0.0.1"), ("[::1]:50053", "[::1]"), ("node-7:50053", "node-7")]
)
def test_peers_reach_it_at_the_host_of_routers_and_at_the_port_that_it_took(address: str, host: str) -> None:
    port = opened(address)
    try:
        name, _, number = port.address.rpartition(":")
        assert name == host
        socket.create_connection(("127.0.0.1", int(number)), 10).close()
    finally:
        port.close()


def test_an_operator_may_say_where_others_reach_it() -> None:
    port = opened("127.0.0.1:50053", data_address="10.0.0.1:7000")
    port.close()
    assert port.address == "10.0.0.1:7000"


def test_a_port_that_is_taken_is_a_mistake_in_the_options() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidConfig, match="--data-port"):
        opened("127.0.0.1:50053", data_port=taken.getsockname()[1])


def test_nixl_is_refused_where_peers_do_not_prove_who_they_are() -> None:
    with pytest.raises(InvalidConfig, match=r"at 0\.0\.0\.0 no peer proves who it is; expected TLS"):
        opened("10.0.0.1:50053", carrier="nixl", host="0.0.0.0", insecure=True)


def test_nixl_is_there_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    use_double(monkeypatch)
    port = opened("127.0.0.1:50053", carrier="nixl")
    assert port._nixl is not None
    assert port._nixl.works
    port.close()
    assert not port._nixl.works
    monkeypatch.setenv("NIXL_DOUBLE_LACKS", "plugin")
    with pytest.raises(InvalidConfig, match="its plugin for UCX is missing"):
        opened("127.0.0.1:50053", carrier="nixl")
