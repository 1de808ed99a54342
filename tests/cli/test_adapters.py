"""`quire adapters`: whose each adapter is, and what each tenant's own take at each worker."""

from __future__ import annotations

from cli.commands.adapters import in_words
from quire.inference.v1 import inference_pb2 as pb


def at(worker: str, kib: int, in_memory: bool = True) -> pb.AdapterAtWorker:
    return pb.AdapterAtWorker(
        worker_id=worker, fingerprint="0123456789abcdef", rank=4, num_bytes=kib << 10, in_memory=in_memory
    )


def of_acme(name: str, *workers: pb.AdapterAtWorker) -> pb.LoadedAdapter:
    return pb.LoadedAdapter(name=name, workers=workers, tenant="acme", tenant_max_bytes=100 << 10)


def test_tenants_and_their_bytes_stand_beside_their_adapters() -> None:
    answer = pb.ListAdaptersResponse(
        adapters=[
            of_acme("acme-1", at("w0", 30), at("w1", 30)),
            of_acme("acme-2", at("w0", 40), at("w1", 40, in_memory=False)),
            pb.LoadedAdapter(name="blue-1", workers=[at("w0", 7)], tenant="blue"),
            pb.LoadedAdapter(name="free", workers=[at("w0", 5), pb.AdapterAtWorker(worker_id="w1", error="no folder")]),
        ]
    )
    assert in_words(answer).splitlines() == [
        "acme-1, of tenant acme",
        "  w0: rank 4, 30 KiB, in memory, content 0123456789ab",
        "  w1: rank 4, 30 KiB, in memory, content 0123456789ab",
        "acme-2, of tenant acme",
        "  w0: rank 4, 40 KiB, in memory, content 0123456789ab",
        "  w1: rank 4, 40 KiB, read when a request names it, content 0123456789ab",
        "blue-1, of tenant blue",
        "  w0: rank 4, 7 KiB, in memory, content 0123456789ab",
        "free",
        "  w0: rank 4, 5 KiB, in memory, content 0123456789ab",
        "  w1: not loaded: no folder",
        "tenant acme: 70 KiB in memory of w0, at most 100",
        "tenant acme: 30 KiB in memory of w1, at most 100",
        "tenant blue: 7 KiB in memory of w0",
    ]
    assert in_words(pb.ListAdaptersResponse()) == "no adapter is loaded"
