"""A proxy of the environment: clients go by it to other machines alone, and services never do."""

from __future__ import annotations

import asyncio

import pytest
from grpc import aio

from common.rpc.probe import ask
from common.rpc.server import open_channel
from quire.api.proxy import is_this_machine
from quire.client import Retry
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from tests.support.fake_router import RouterDouble, facing, served
from tests.support.proxies import Proxy, running_proxy

ONCE = Retry(attempts=1)
ELSEWHERE = "router.invalid:50051"
both = pytest.mark.parametrize("kind", ["threads", "asyncio"])


def set_environment(monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    for name, value in proxy.environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50051",
        "127.8.8.8:50051",
        "localhost:50051",
        "LOCALHOST:50051",
        "localhost.:50051",
        "router.localhost:50051",
        "[::1]:50051",
        "::1",
        "[::]:50051",
        "0.0.0.0:50051",
        "[::ffff:127.0.0.1]:50051",
        "dns:///localhost:50051",
        "dns:localhost:50051",
        "dns:///[::1]:50051",
        "ipv4:127.0.0.1:50051",
        "ipv6:[::1]:50051",
        "ipv6:%5B::1%5D:50051",
        "unix:/run/quire.sock",
        "unix-abstract:quire",
        "127.0.0.1",
    ],
)
def test_an_address_of_this_machine(address: str) -> None:
    assert is_this_machine(address)


@pytest.mark.parametrize(
    "address",
    [
        "router:50051",
        "10.0.0.7:50051",
        "[fe80::1%eth0]:50051",
        "[2001:db8::1]:50051",
        "localhost.example.com:50051",
        "notlocalhost:50051",
        "127.0.0.1.example.com:50051",
        "dns:///router.example:443",
        "dns://8.8.8.8/router.example:443",
        "",
    ],
)
def test_an_address_of_another_machine(address: str) -> None:
    assert not is_this_machine(address)


@both
async def test_a_client_of_this_machine_uses_no_proxy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy() as proxy, served(RouterDouble()) as address:
        set_environment(monkeypatch, proxy)
        async with facing(kind, address, retry=ONCE) as face:
            assert (await face.call("generate", "x")).text == "Hello"
        assert proxy.asked == []


@both
async def test_a_client_of_another_machine_goes_by_the_proxy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(RouterDouble()) as address, running_proxy(int(address.rpartition(":")[2])) as proxy:
        set_environment(monkeypatch, proxy)
        async with facing(kind, ELSEWHERE, retry=ONCE) as face:
            assert (await face.call("generate", "x")).text == "Hello"
        assert proxy.asked == [f"CONNECT {ELSEWHERE} HTTP/1.1"]


async def test_channels_between_services_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(RouterDouble()) as address, running_proxy(int(address.rpartition(":")[2])) as proxy:
        set_environment(monkeypatch, proxy)
        for target, reached in ((address, True), (ELSEWHERE, False)):
            async with open_channel(target) as channel:
                call = rpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=60.0)
                try:
                    assert (await call).model == "demo"
                except aio.AioRpcError:
                    assert not reached
        assert proxy.asked == []


async def test_an_operator_elsewhere_may_go_by_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(RouterDouble()) as address, running_proxy(int(address.rpartition(":")[2])) as proxy:
        set_environment(monkeypatch, proxy)
        async with open_channel(ELSEWHERE, by_proxy=True) as channel:
            await rpc.InferenceServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=60.0)
        assert proxy.asked == [f"CONNECT {ELSEWHERE} HTTP/1.1"]


async def test_the_probe_of_containers_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy() as proxy:
        set_environment(monkeypatch, proxy)
        assert (await asyncio.to_thread(ask, "127.0.0.1:1")).startswith("UNAVAILABLE")
        assert (await asyncio.to_thread(ask, ELSEWHERE)).startswith("UNAVAILABLE")
        assert proxy.asked == []
