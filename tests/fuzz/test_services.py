"""Any message of any method, on every service: a result or a proper refusal, and nothing that stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from common.rpc.server import open_channel
from quire.decision.v1 import decision_pb2
from quire.gpuworker.v1 import gpuworker_pb2
from quire.inference.v1 import inference_pb2
from quire.kserve.v2 import kserve_pb2
from quire.kvmanager.v1 import kvmanager_pb2
from quire.vllm.v1 import control_pb2, engine_pb2
from quire.vllm.v1 import inference_pb2 as vllm_inference_pb2
from tests.fuzz.harness import ANY, Fuzzed, again_and_again, call_both_ways, call_streaming, call_unary
from tests.fuzz.messages import encoded, request_class

MODULES = {
    "router": [inference_pb2, decision_pb2, kserve_pb2, vllm_inference_pb2, control_pb2, engine_pb2],
    "admin": [decision_pb2, trace_service_pb2],
    "kvmanager": [kvmanager_pb2],
    "worker": [gpuworker_pb2],
}
# Seconds without a message after which a stream is left: those of leases and of workers do not end by themselves.
QUIET = 0.05
# Answers of methods with these names come until the caller leaves.
ENDLESS = ("Subscribe", "Watch")
PASSED_ON = {"ResetPrefixCache", "SubscribeKvEvents", "ListPins", "UnpinPrefix"}


def methods(modules: list[Any]) -> list[Any]:
    """Return the descriptors of all methods of the modules' services."""
    services = [service for each in modules for service in each.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def name(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


CASES = [(where, method) for where, modules in MODULES.items() for method in methods(modules)]
# The admin plane answers these, and passes others on to the KV manager.
CASES += [("admin", method) for method in methods([inference_pb2]) if method.name in ("Pin", "Prefetch")]
CASES += [("admin", method) for method in methods([kvmanager_pb2]) if method.name in PASSED_ON]


@contextmanager
def channel_to(fuzzed: Fuzzed, where: str) -> Iterator[aio.Channel]:
    options = fuzzed.suite.stack.options
    addresses = {
        "router": fuzzed.suite.stack.address,
        "admin": fuzzed.suite.stack.admin_address,
        "kvmanager": f"{options.admin_host}:{options.manager_port}",
        "worker": f"{options.admin_host}:{options.worker_ports[0]}",
    }

    async def opened() -> aio.Channel:
        return open_channel(addresses[where])

    channel = fuzzed.run(opened())
    try:
        yield channel
    finally:
        fuzzed.run(channel.close())


@pytest.mark.parametrize(("where", "method"), CASES, ids=[f"{where}{name(method)}" for where, method in CASES])
def test_any_message_is_served_or_refused(fuzzed: Fuzzed, where: str, method: Any) -> None:
    kind, path = request_class(method), name(method)
    content = encoded(kind)

    with channel_to(fuzzed, where) as channel:

        async def send(messages: list[bytes]) -> None:
            if method.client_streaming:
                await call_both_ways(channel, path, messages, QUIET)
            elif method.name.startswith(ENDLESS):
                await call_streaming(channel, path, messages[0], QUIET)
            else:
                await (call_streaming if method.server_streaming else call_unary)(channel, path, messages[0])

        @ANY
        @given(messages=st.lists(content, min_size=1, max_size=6 if method.client_streaming else 1))
        def send_any(messages: list[bytes]) -> None:
            fuzzed.recent.append(f"{path} {messages!r}")
            fuzzed.run(send(messages))

        again_and_again(send_any, 0.5 / len(CASES))
    fuzzed.check()
