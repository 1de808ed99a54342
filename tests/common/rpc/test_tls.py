"""TLS between real servers and channels: roles, foreign and expired certificates, and certificates that change."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.certificates import authority
from cli.certificates.folder import CertificateFolder
from common.contracts.errors import InvalidConfig
from common.rpc.roles import Role, callers_of, dns_name, peer_of
from common.rpc.server import RpcServer, open_channel
from common.rpc.tls import CertificateFiles, Identity, PublicCertificate
from quire.kvmanager.v1 import kvmanager_pb2 as pb
from quire.kvmanager.v1 import kvmanager_pb2_grpc as rpc
from tests.support.certificates import expired, new_folder, renew
from tests.support.lost_status import is_lost

PATIENCE = 60.0
SERVICE = "quire.kvmanager.v1.KvManagerService"
Context = aio.ServicerContext[Any, Any]


@dataclass
class Manager(rpc.KvManagerServiceServicer):
    """Answers each message of a session, and records the certificates of its callers."""

    callers: list[str] = field(default_factory=list)

    async def Session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        self.callers.append(_shown(context))
        async for request in requests:
            yield pb.SessionResponse(seq=request.seq)

    async def WatchLeader(
        self, request: pb.WatchLeaderRequest, context: Context
    ) -> AsyncIterator[pb.WatchLeaderResponse]:
        raise NotImplementedError
        yield

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        raise NotImplementedError

    async def GetBlockTable(self, request: pb.GetBlockTableRequest, context: Context) -> pb.GetBlockTableResponse:
        raise NotImplementedError

    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:
        peer = peer_of(context)
        assert peer is not None
        return pb.GetPoolResponse(epoch=len(peer.roles))

    async def GetBlockMap(self, request: pb.GetBlockMapRequest, context: Context) -> pb.GetBlockMapResponse:
        raise NotImplementedError

    async def GetBlock(self, request: pb.GetBlockRequest, context: Context) -> pb.GetBlockResponse:
        raise NotImplementedError

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        raise NotImplementedError

    def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> Any:
        raise NotImplementedError

    async def PinPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def ListPins(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def PrefetchPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def UnpinPrefix(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


def _shown(context: Context) -> str:
    (pem,) = context.auth_context()["x509_pem_cert"]
    return pem.decode()


class Served:
    """A server of the manager's role, and the certificates of all roles."""

    def __init__(self, folder: CertificateFolder, server: RpcServer, manager: Manager) -> None:
        self.folder, self.server, self.manager = folder, server, manager
        self.address = f"127.0.0.1:{server.port}"

    def identity(self, role: Role) -> Identity:
        return self.folder.role(role).identity()

    async def code(self, method: str, channel: aio.Channel) -> grpc.StatusCode:
        """Call a method over a channel; return how that ended."""
        async with channel:
            while True:
                try:
                    await self._call(method, channel)
                except aio.AioRpcError as error:
                    if not is_lost(error):
                        return error.code()
                else:
                    return grpc.StatusCode.OK

    async def _call(self, method: str, channel: aio.Channel) -> None:
        stub = rpc.KvManagerServiceStub(channel)
        match method:
            case "Session":
                call: Any = stub.Session(iter([pb.SessionRequest(seq=1)]), timeout=PATIENCE)
                assert (await call.read()).seq == 1
            case "GetPool":
                await stub.GetPool(pb.GetPoolRequest(), timeout=PATIENCE)
            case "Check":
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    folder, manager = new_folder(tmp_path / "certs"), Manager()
    server = RpcServer([SERVICE], tls=folder.role(Role.MANAGER).identity())
    rpc.add_KvManagerServiceServicer_to_server(manager, server.server)
    await server.start("127.0.0.1", 0)
    await server.ready()
    yield Served(folder, server, manager)
    await server.stop(0.0)


OK, DENIED, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("role", "method", "code"),
    [
        (Role.WORKER, "Session", OK),
        (Role.ROUTER, "Session", DENIED),
        (Role.OPERATOR, "Session", DENIED),
        (Role.MANAGER, "Session", DENIED),
        (Role.OPERATOR, "GetPool", OK),
        (Role.ROUTER, "GetPool", OK),
        (Role.WORKER, "GetPool", DENIED),
        (Role.WORKER, "Check", OK),
        (Role.ROUTER, "Check", OK),
    ],
)
async def test_a_role_calls_its_methods_alone(served: Served, role: Role, method: str, code: grpc.StatusCode) -> None:
    channel = open_channel(served.address, identity=served.identity(role), role=Role.MANAGER)
    assert await served.code(method, channel) is code


@pytest.mark.parametrize("method", ["GetBlockMap", "GetBlock", "GetBlockTable"])
def test_routers_and_operators_see_blocks(method: str) -> None:
    assert callers_of(f"/{SERVICE}/{method}") == {Role.ROUTER, Role.OPERATOR}


@pytest.mark.parametrize("kind", [x509.RFC822Name, x509.UniformResourceIdentifier])
async def test_a_role_is_the_name_of_a_host_alone(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: type[x509.RFC822Name | x509.UniformResourceIdentifier]
) -> None:
    """A name of another kind says whom to write to, or what to fetch."""
    name = dns_name(Role.WORKER)
    monkeypatch.setattr(authority, "_general", lambda each: kind(each) if each == name else x509.DNSName(each))
    wanted = authority.Wanted(served.folder.role(Role.WORKER), ("worker.example", name))
    authority.Authority.open(served.folder).issue(wanted, 1)
    channel = open_channel(served.address, identity=wanted.leaf.identity(), role=Role.MANAGER)
    assert await served.code("Session", channel) is DENIED


async def test_a_refusal_names_both_roles(served: Served) -> None:
    async with open_channel(served.address, identity=served.identity(Role.ROUTER), role=Role.MANAGER) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await rpc.KvManagerServiceStub(channel).Lookup(pb.LookupRequest(), timeout=PATIENCE)
    expected = f"/{SERVICE}/Lookup is for operator; the caller's certificate names router"
    assert caught.value.details() == expected


async def test_without_a_certificate_nobody_gets_in(served: Served) -> None:
    roots = served.folder.ca_cert.read_bytes()
    named = [("grpc.ssl_target_name_override", "manager.quire.internal")]
    nameless = aio.secure_channel(served.address, grpc.ssl_channel_credentials(roots), options=named)
    for channel in (open_channel(served.address), nameless):
        assert await served.code("Check", channel) is UNAVAILABLE


async def test_a_certificate_of_another_ca_counts_for_nothing(served: Served, tmp_path: Path) -> None:
    """Not even if the caller trusts the server."""
    foreign, own = new_folder(tmp_path / "foreign").role(Role.WORKER), served.folder.role(Role.WORKER)
    identity = Identity(CertificateFiles(foreign.cert, foreign.key, own.ca))
    channel = open_channel(served.address, identity=identity, role=Role.MANAGER)
    assert await served.code("Session", channel) is UNAVAILABLE


async def test_an_expired_certificate_counts_for_nothing(served: Served, tmp_path: Path) -> None:
    identity = expired(served.folder, Role.WORKER, tmp_path / "old").identity()
    channel = open_channel(served.address, identity=identity, role=Role.MANAGER)
    assert await served.code("Session", channel) is UNAVAILABLE


@pytest.mark.parametrize("expected", [Role.WORKER, Role.ROUTER])
async def test_a_client_accepts_servers_of_the_role_alone(served: Served, expected: Role) -> None:
    channel = open_channel(served.address, identity=served.identity(Role.WORKER), role=expected)
    assert await served.code("Session", channel) is UNAVAILABLE


async def test_a_client_refuses_a_server_of_another_ca(served: Served, tmp_path: Path) -> None:
    identity = new_folder(tmp_path / "foreign").role(Role.WORKER).identity()
    channel = open_channel(served.address, identity=identity, role=Role.MANAGER)
    assert await served.code("Session", channel) is UNAVAILABLE


async def test_public_ports_ask_no_certificate_and_own_ports_do(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    leaf = folder.role(Role.ROUTER)
    public, own = PublicCertificate.of(leaf.cert, leaf.key), leaf.identity()
    server = RpcServer([SERVICE], tls=public, own_tls=own)
    rpc.add_KvManagerServiceServicer_to_server(Manager(), server.server)
    await server.start("127.0.0.1", 0, own_port=0)
    both = Served(folder, server, Manager())
    credentials = grpc.ssl_channel_credentials(leaf.ca.read_bytes())
    named = [("grpc.ssl_target_name_override", "router.quire.internal")]
    codes = [
        await both.code("Check", aio.secure_channel(f"127.0.0.1:{port}", credentials, options=named))
        for port in (server.port, server.own_port)
    ]
    as_worker = open_channel(f"127.0.0.1:{server.own_port}", identity=both.identity(Role.WORKER), role=Role.ROUTER)
    codes.append(await both.code("GetPool", as_worker))
    await server.stop(0.0)
    assert codes == [OK, UNAVAILABLE, DENIED]


# ------------------------------------------------------------ certificates that change


def presented(served: Served) -> str:
    """Return the certificate that the server shows to a new connection."""
    leaf = served.folder.role(Role.OPERATOR)
    context = ssl.create_default_context(cafile=str(leaf.ca))
    context.load_cert_chain(leaf.cert, leaf.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", served.server.port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="manager.quire.internal") as connection,
    ):
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)


async def test_a_renewed_certificate_counts_at_once_and_streams_go_on(served: Served) -> None:
    leaf = served.folder.role(Role.MANAGER)
    before = leaf.cert.read_text()
    assert await asyncio.to_thread(presented, served) == before
    async with AsyncExitStack() as stack:
        channel = open_channel(served.address, identity=served.identity(Role.WORKER), role=Role.MANAGER)
        call: Any = rpc.KvManagerServiceStub(await stack.enter_async_context(channel)).Session(timeout=PATIENCE)
        await call.write(pb.SessionRequest(seq=1))
        assert (await call.read()).seq == 1
        renew(served.folder, Role.MANAGER)
        after = await asyncio.to_thread(presented, served)
        assert after == leaf.cert.read_text() != before
        await call.write(pb.SessionRequest(seq=2))
        assert (await call.read()).seq == 2
        call.cancel()


async def test_a_client_shows_its_renewed_certificate_on_the_next_connection(served: Served) -> None:
    identity, leaf = served.identity(Role.WORKER), served.folder.role(Role.WORKER)
    files = []
    for _ in range(2):
        files.append(leaf.cert.read_text())
        channel = open_channel(served.address, identity=identity, role=Role.MANAGER)
        assert await served.code("Session", channel) is OK
        renew(served.folder, Role.WORKER)
    assert served.manager.callers == files
    assert files[0] != files[1]


async def test_files_that_do_not_fit_together_leave_the_certificate_from_before(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    leaf = served.folder.role(Role.MANAGER)
    before, key = leaf.cert.read_text(), leaf.key.read_bytes()
    renew(served.folder, Role.MANAGER)
    new_key = leaf.key.read_bytes()
    leaf.key.write_bytes(key)  # a rotation that has come halfway
    assert await asyncio.to_thread(presented, served) == before
    assert "the certificate from before stays" in caplog.text
    leaf.key.write_bytes(new_key)
    assert await asyncio.to_thread(presented, served) == leaf.cert.read_text() != before


# ------------------------------------------------------------ files that cannot be used


def test_a_file_that_is_missing_is_named_by_its_option(tmp_path: Path) -> None:
    leaf = new_folder(tmp_path).role(Role.WORKER)
    leaf.key.unlink()
    with pytest.raises(InvalidConfig, match=r"--tls-key: .*tls\.key: .*No such file.*expected PEM files"):
        leaf.identity()


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    ours, theirs = folder.role(Role.WORKER), folder.role(Role.ROUTER)
    with pytest.raises(InvalidConfig, match="belong together"):
        CertificateFiles(ours.cert, theirs.key, ours.ca)
