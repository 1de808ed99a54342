"""The roles of Quire's services, their names in certificates, and the one table of who may call what.

A certificate names its role as a DNS name: `worker.quire.internal`. A worker with a leaf of its own has its id too:
`worker-0.worker.quire.internal`. A server checks the caller's role for each method; a client checks the server's name.
A method that the table does not have is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from grpc import aio

from common.contracts.errors import PermissionDenied

Context: TypeAlias = "aio.ServicerContext[Any, Any]"

DOMAIN: Final = "quire.internal"


class Role(StrEnum):
    """What a certificate allows its owner to be. `operator` is for people and probes, `collector` passes spans on."""

    ROUTER = "router"
    MANAGER = "manager"
    WORKER = "worker"
    OPERATOR = "operator"
    COLLECTOR = "collector"


_ALL: Final = frozenset(Role)
_OPERATOR: Final = frozenset({Role.OPERATOR})
# By method, or by service for its other methods.
CALLERS: Final[Mapping[str, frozenset[Role]]] = {
    "/quire.kvmanager.v1.KvManagerService/Session": frozenset({Role.WORKER}),
    "/quire.kvmanager.v1.KvManagerService/WatchLeader": frozenset(
        {Role.WORKER, Role.MANAGER, Role.ROUTER, Role.OPERATOR}
    ),
    # A router's admin plane passes these on for operators.
    "/quire.kvmanager.v1.KvManagerService/ResetPrefixCache": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/SubscribeKvEvents": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/GetPool": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/PinPrefix": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/ListPins": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/UnpinPrefix": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/PrefetchPrefix": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/GetBlockMap": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/GetBlock": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/GetBlockTable": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.kvmanager.v1.KvManagerService/": _OPERATOR,
    "/quire.gpuworker.v1.GpuWorkerService/Stream": frozenset({Role.ROUTER}),
    "/quire.gpuworker.v1.GpuWorkerService/": _OPERATOR,
    # Routers that share ports query each other's records.
    "/quire.decision.v1.DecisionService/": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.inference.v1.InferenceService/Abort": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.inference.v1.InferenceService/GetLoads": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.inference.v1.InferenceService/GetModel": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.inference.v1.InferenceService/GetStatus": frozenset({Role.ROUTER, Role.OPERATOR}),
    "/quire.inference.v1.InferenceService/Pin": _OPERATOR,
    "/quire.inference.v1.InferenceService/Prefetch": _OPERATOR,
    "/quire.inference.v1.InferenceService/LoadAdapter": _OPERATOR,
    "/quire.inference.v1.InferenceService/UnloadAdapter": _OPERATOR,
    "/quire.inference.v1.InferenceService/ListAdapters": _OPERATOR,
    # Spans of the other services.
    "/opentelemetry.proto.collector.trace.v1.TraceService/": frozenset({Role.WORKER, Role.MANAGER, Role.COLLECTOR}),
    "/grpc.health.v1.Health/": _ALL,
    "/grpc.reflection.v1.ServerReflection/": _OPERATOR,
    "/grpc.reflection.v1alpha.ServerReflection/": _OPERATOR,
}


@dataclass(frozen=True, slots=True)
class Peer:
    """The names in a verified certificate: its roles, and the ids of workers that it stands for (none: any id)."""

    roles: frozenset[Role]
    worker_ids: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return ", ".join(sorted(self.roles)) or "no role"


def dns_name(role: Role, worker_id: str = "") -> str:
    """Return the name in the certificate of a role, or of one worker."""
    return f"{worker_id}.{role}.{DOMAIN}" if worker_id else f"{role}.{DOMAIN}"


def peer_of_names(names: Iterable[str]) -> Peer:
    """Return what the names of a certificate stand for; names of other domains count for nothing."""
    known = {dns_name(role): role for role in Role}
    own = "." + dns_name(Role.WORKER)
    found = list(names)
    return Peer(
        frozenset(known[name] for name in found if name in known),
        frozenset(name.removesuffix(own) for name in found if name.endswith(own)),
    )


def peer_of(context: Context) -> Peer | None:
    """Return the caller as its certificate names it; None where the port asks for no certificate."""
    found = context.auth_context()
    if not found.get("x509_pem_cert"):
        return None
    # Of the alternative names those of hosts alone: a CA that checks these may let a holder choose a mail address.
    return peer_of_names(name.decode(errors="replace") for name in found.get("peer_dns", ()))


def callers_of(method: str) -> frozenset[Role]:
    """Return the roles that may call a method (`/package.Service/Method`)."""
    service = method[: method.rfind("/") + 1]
    return CALLERS.get(method, CALLERS.get(service, frozenset()))


class ChecksRole:
    """Around a handler: refuses callers whose role may not call the method. Raises PermissionDenied.

    On a public port callers have no certificate; other checks stand there.
    """

    def __init__(self, method: str, context: Context) -> None:
        self._method, self._context = method, context

    async def __aenter__(self) -> None:
        peer, allowed = peer_of(self._context), callers_of(self._method)
        if peer is not None and not peer.roles & allowed:
            wanted = " or ".join(sorted(allowed)) or "no role"
            raise PermissionDenied(f"{self._method} is for {wanted}; the caller's certificate names {peer}")

    async def __aexit__(self, *_: object) -> None:
        return None
