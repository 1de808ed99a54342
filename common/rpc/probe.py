"""`python -m common.rpc.probe HOST:PORT [SERVICE]`: asks grpc.health.v1 once; status 0 when the answer is SERVING.

`python -m common.rpc.probe http://HOST:PORT/health`: the same by HTTP, for ports whose gRPC takes services alone.
For probes of containers and orchestrators, which run it every few seconds: it loads gRPC (not for HTTP) and nearly
nothing else of Quire. No proxy of the environment comes between.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from quire.api.proxy import PROXY_OPTION

TIMEOUT_S: Final = 3.0
SERVING, NOT_SERVING, MISUSED = 0, 1, 2


def ask(address: str, service: str = "", timeout: float = TIMEOUT_S) -> str:
    """Return the health of a service, "" for the whole server: SERVING, NOT_SERVING, or the gRPC status instead."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, [(PROXY_OPTION, 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def fetch(url: str, timeout: float = TIMEOUT_S) -> str:
    """Return the health that a URL answers with: SERVING, NOT_SERVING, or why there is no answer."""
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=timeout) as answer:
            return "SERVING" if answer.status == HTTPStatus.OK else "NOT_SERVING"
    except HTTPError as error:
        error.close()
        return "NOT_SERVING" if error.code == HTTPStatus.SERVICE_UNAVAILABLE else f"HTTP {error.code}"
    except (URLError, OSError) as error:
        return f"UNAVAILABLE: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) not in (1, 2):
        print("usage: python -m common.rpc.probe HOST:PORT [SERVICE], or http://HOST:PORT/health", file=sys.stderr)  # noqa: T201
        return MISUSED
    address, service = [*words, ""][:2]
    answer = fetch(address) if address.startswith("http://") else ask(address, service)
    print(answer)  # noqa: T201
    return SERVING if answer == "SERVING" else NOT_SERVING


if __name__ == "__main__":
    sys.exit(main())
