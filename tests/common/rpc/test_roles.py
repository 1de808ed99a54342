"""The table of who may call what, and the names in certificates."""

from __future__ import annotations

import pytest

from common.rpc.roles import CALLERS, Peer, Role, callers_of, dns_name, peer_of_names
from quire.decision.v1 import decision_pb2
from quire.gpuworker.v1 import gpuworker_pb2
from quire.inference.v1 import inference_pb2
from quire.kvmanager.v1 import kvmanager_pb2

FILES = (decision_pb2, gpuworker_pb2, inference_pb2, kvmanager_pb2)
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


# What clients call, on the public port alone.
_INFERENCE = "/quire.inference.v1.InferenceService/"
PUBLIC = {
    _INFERENCE + name for name in ("Generate", "GenerateUnary", "Embed", "Tokenize", "Detokenize", "GetTokenizer")
}


def test_the_diagram_is_the_table() -> None:
    assert callers_of("/quire.kvmanager.v1.KvManagerService/Session") == {Role.WORKER}
    assert callers_of("/quire.gpuworker.v1.GpuWorkerService/Stream") == {Role.ROUTER}
    senders = {Role.WORKER, Role.MANAGER, Role.COLLECTOR}
    assert callers_of("/opentelemetry.proto.collector.trace.v1.TraceService/Export") == senders


def test_a_collector_does_nothing_but_pass_spans_on() -> None:
    assert {method for method in CALLERS if Role.COLLECTOR in callers_of(method)} == {
        "/opentelemetry.proto.collector.trace.v1.TraceService/",
        "/grpc.health.v1.Health/",
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_method_between_services_has_callers(method: str) -> None:
    assert bool(callers_of(method)) is (method not in PUBLIC)


def test_the_table_has_no_method_that_does_not_exist() -> None:
    ours = {name for name in CALLERS if name.startswith("/quire.")}
    assert all(any(method.startswith(name) for method in METHODS) for name in ours)


@pytest.mark.parametrize("method", ["/quire.kvmanager.v1.KvManagerServices/Session", "/x/Y", "/", ""])
def test_nobody_may_call_what_the_table_does_not_have(method: str) -> None:
    assert callers_of(method) == frozenset()


def test_names_say_role_and_id() -> None:
    assert peer_of_names([dns_name(Role.WORKER)]) == Peer(frozenset({Role.WORKER}))
    both = [dns_name(Role.WORKER), dns_name(Role.WORKER, "worker-0")]
    assert peer_of_names(both) == Peer(frozenset({Role.WORKER}), frozenset({"worker-0"}))


@pytest.mark.parametrize(
    "name", ["worker.quire.internal.evil.example", "xworker.quire.internal", "worker", "worker-0.router.quire.internal"]
)
def test_other_names_are_no_role(name: str) -> None:
    assert peer_of_names([name]) == Peer(frozenset())
