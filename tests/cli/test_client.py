"""What the commands print with, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from cli.client import admin_channel, router_client, run_command
from common.contracts.errors import Unavailable, Unsupported
from common.rpc.server import RpcServer
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(console: Console) -> None:
        console.print("x[0] :smile: 'a'", markup=False)

    assert run_command(body) == 0
    assert capsys.readouterr().out == "x[0] :smile: 'a'\n"


def test_an_error_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(_: Console) -> None:
        raise Unavailable("nobody is there")

    assert run_command(body) == 1
    assert capsys.readouterr().err == "quire: nobody is there\n"


async def test_a_server_that_is_no_router_is_distinguished_from_one(tmp_path: Path) -> None:
    server = RpcServer(["another.Service"])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    said = f"the server at {address} is not a router, or this is not its API port; `quire serve` prints the address"
    with pytest.raises(Unsupported) as error:
        async with router_client(address) as client:
            await client.generate("Hello")
    assert str(error.value) == said
    with pytest.raises(Unsupported) as error:
        async with admin_channel(address, tmp_path) as channel:
            await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest())
    assert str(error.value) == said
    await server.server.stop(None)
