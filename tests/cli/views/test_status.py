"""What `quire status` says above its workers."""

from __future__ import annotations

import io

from rich.console import Console

from cli.views.status import Ledgers, StatusView
from quire.client import Model, Status
from quire.inference.v1 import inference_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2
from quire.types.v1 import types_pb2 as types
from router.observe.pool_words import disk_problems, disk_words, host_words

FULL = types.KvGroup(kind=types.KV_GROUP_KIND_FULL, pages=4)
WINDOW = types.KvGroup(kind=types.KV_GROUP_KIND_WINDOW, span=1024, pages=21)


def shown(*groups: types.KvGroup, held: str = "", host: str = "", disk: str = "") -> list[str]:
    identity = types.PoolIdentity(block_size=16, kv_geometry=types.KvGeometry(groups=groups))
    model = Model.from_proto(pb.GetModelResponse(model="m", identity=identity))
    console = Console(file=io.StringIO(), width=120)
    ledgers = Ledgers(held=held, host=host, disk=disk)
    console.print(StatusView(model, Status.from_proto(pb.GetStatusResponse()), ledgers))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_worker_that_does_not_do_all_says_what_it_does() -> None:
    roles = {"w0": "prefill", "w1": "decode", "w2": ""}
    workers = [pb.WorkerStatus(worker_id=name, disaggregation=role) for name, role in roles.items()]
    workers[0].reason = "late"
    console = Console(file=io.StringIO(), width=300)
    status = Status.from_proto(pb.GetStatusResponse(workers=workers))
    console.print(StatusView(Model.from_proto(pb.GetModelResponse(model="m")), status, Ledgers(held="", host="")))
    assert isinstance(console.file, io.StringIO)
    rows = [line.rstrip() for line in console.file.getvalue().splitlines() if line.startswith("w")][-3:]
    assert rows[0].endswith(" computes prompts for others; late")
    assert rows[1].endswith(" decodes")
    assert rows[2].endswith(" -")


def test_a_pool_of_pages_says_what_they_are() -> None:
    words = "Blocks are counted in pages: 16 tokens take 4 in full layers and 21 in windows of 1,024"
    assert shown(FULL, WINDOW)[2] == words
    assert [line for line in shown() if "pages" in line] == []


def test_groups_of_layers_say_what_they_hold() -> None:
    assert shown(FULL, WINDOW, held="full: 3 blocks in use, 0 cached")[3] == (
        "Groups of layers: full: 3 blocks in use, 0 cached"
    )
    assert [line for line in shown() if "Groups" in line] == []


def test_workers_with_host_memory_say_how_much_of_it_is_used() -> None:
    pools = [
        kvmanager_pb2.Pool(worker_id="worker-0", host_frames=4096, host_held=1200),
        kvmanager_pb2.Pool(worker_id="worker-1"),
        kvmanager_pb2.Pool(worker_id="worker-2", host_frames=16),
    ]
    words = host_words(pools)
    assert words == "worker-0 1,200 of 4,096 and worker-2 0 of 16 blocks"
    assert shown(host=words)[2] == f"Host memory: {words}"
    assert (host_words(pools[1:2]), [line for line in shown() if "Host" in line]) == ("", [])
    pools[0].ahead = 1
    assert host_words(pools) == f"{words} (1 prefix on the way ahead of need)"
    pools[2].ahead = 2
    assert host_words(pools) == f"{words} (3 prefixes on the way ahead of need)"
    pools[2].groups.add(pages=2)
    assert host_words(pools[2:]) == "worker-2 0 of 16 pages (2 prefixes on the way ahead of need)"


def test_workers_with_a_disk_cache_say_how_much_of_it_is_used() -> None:
    pools = [
        kvmanager_pb2.Pool(worker_id="worker-0", disk_frames=87125, disk_held=1200, fetching=2),
        kvmanager_pb2.Pool(worker_id="worker-1"),
        kvmanager_pb2.Pool(worker_id="worker-2", disk_closed=True),
        kvmanager_pb2.Pool(worker_id="worker-3", disk_frames=16),
    ]
    words = disk_words(pools)
    assert words == (
        "worker-0 1,200 of 87,125 blocks (2 sequences wait for some), worker-2 has given it up and "
        "worker-3 0 of 16 blocks"
    )
    assert shown(disk=words)[2] == f"Disk: {words}"
    assert (disk_words(pools[1:2]), [line for line in shown() if "Disk" in line]) == ("", [])
    assert disk_problems(pools) == ["worker-2 has given up its disk cache; its log says why"]
