"""Where the advice of `quire why` is explained: at the router that was asked, else in the installed file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cli.why.runbook import INSTALLED, runbook_at
from common.rpc.server import RpcServer, open_channel
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc


class Admin(rpc.InferenceServiceServicer):
    port = 51999

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(admin_http_port=self.port)


@pytest.fixture
async def admin() -> AsyncIterator[tuple[Admin, int]]:
    servicer = Admin()  # type: ignore[abstract]
    server = RpcServer(["quire.inference.v1.InferenceService"])
    rpc.add_InferenceServiceServicer_to_server(servicer, server.server)
    yield servicer, await server.start("127.0.0.1", 0)
    await server.stop(0.0)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:50050", "http://127.0.0.1:51999/page/runbook"),
        ("[::1]:50050", "http://[::1]:51999/page/runbook"),
        ("router.example:50050", "http://router.example:51999/page/runbook"),
    ],
)
async def test_the_router_says_where_it_serves_the_runbook(admin: tuple[Admin, int], address: str, url: str) -> None:
    async with open_channel(f"127.0.0.1:{admin[1]}") as channel:
        assert await runbook_at(channel, address) == url


async def test_without_a_routers_word_the_installed_file_is_named(admin: tuple[Admin, int]) -> None:
    admin[0].port = 0
    async with open_channel(f"127.0.0.1:{admin[1]}") as channel:
        assert await runbook_at(channel, "127.0.0.1:50050") == INSTALLED
    async with open_channel("127.0.0.1:1") as channel:
        assert await runbook_at(channel, "127.0.0.1:1") == INSTALLED


def test_the_installed_file_is_the_runbook() -> None:
    assert "### QuireBlocksShort" in Path(INSTALLED).read_text()
