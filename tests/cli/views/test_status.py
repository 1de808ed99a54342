"""What `quire status` says above its workers."""

from __future__ import annotations

import io

from rich.console import Console

from cli.views.status import Ledgers, StatusView
from quire.client import Model, Status
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types

FULL = types.KvGroup(kind=types.KV_GROUP_KIND_FULL, pages=4)
WINDOW = types.KvGroup(kind=types.KV_GROUP_KIND_WINDOW, span=1024, pages=21)


def shown(*groups: types.KvGroup, held: str = "") -> list[str]:
    identity = types.PoolIdentity(block_size=16, kv_geometry=types.KvGeometry(groups=groups))
    model = Model.from_proto(pb.GetModelResponse(model="m", identity=identity))
    console = Console(file=io.StringIO(), width=120)
    console.print(StatusView(model, Status.from_proto(pb.GetStatusResponse()), Ledgers(held=held)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_pool_of_pages_says_what_they_are() -> None:
    words = "Blocks are counted in pages: 16 tokens take 4 in full layers and 21 in windows of 1,024"
    assert shown(FULL, WINDOW)[2] == words
    assert [line for line in shown() if "pages" in line] == []


def test_groups_of_layers_say_what_they_hold() -> None:
    assert shown(FULL, WINDOW, held="full: 3 blocks in use, 0 cached")[3] == (
        "Groups of layers: full: 3 blocks in use, 0 cached"
    )
    assert [line for line in shown() if "Groups" in line] == []
