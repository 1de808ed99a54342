"""How both clients reach a router that requires TLS and a key: by arguments, and by QUIRE_CA and QUIRE_API_KEY."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder
from cli.client import PLAIN, ClientSettings, admin_channel, router_client
from common.contracts.errors import InvalidConfig, Unavailable
from common.rpc.roles import Role
from common.rpc.tls import PublicCertificate
from quire.client import Client, Retry
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from tests.support.certificates import new_folder
from tests.support.fake_router import RouterDouble, facing, served

ONCE = Retry(attempts=1)
both = pytest.mark.parametrize("kind", ["threads", "asyncio"])


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    """Certificates of a router's public ports."""
    folder = CertificateFolder(tmp_path / "certs")
    make(folder, wanted(folder, [], public=["localhost", "127.0.0.1"]))
    return folder


@pytest.fixture
def tls(folder: CertificateFolder) -> PublicCertificate:
    certificate = PublicCertificate.of(folder.public.cert, folder.public.key)
    assert certificate is not None
    return certificate


async def answered(kind: str, double: RouterDouble, tls: PublicCertificate | None, **options: Any) -> str:
    """Generate once; return the authorization that the router got."""
    async with served(double, tls) as address, facing(kind, address, retry=ONCE, **options) as face:
        assert (await face.call("generate", "x")).text == "Hello"
    return str(double.metadata[0].get("authorization", ""))


@both
async def test_a_ca_and_a_key_by_arguments(kind: str, folder: CertificateFolder, tls: PublicCertificate) -> None:
    assert await answered(kind, RouterDouble(), tls, ca=folder.public.ca, api_key="k-1") == "Bearer k-1"


@both
async def test_a_ca_and_a_key_by_the_environment(
    kind: str, folder: CertificateFolder, tls: PublicCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CA", str(folder.public.ca))
    monkeypatch.setenv("QUIRE_API_KEY", "k-2")
    assert await answered(kind, RouterDouble(), tls) == "Bearer k-2"
    assert await answered(kind, RouterDouble(), None, ca="", api_key="") == ""


@both
async def test_an_authorization_of_its_own_is_not_replaced(kind: str) -> None:
    own = (("authorization", "Bearer token"),)
    assert await answered(kind, RouterDouble(), None, metadata=own, api_key="k-3") == "Bearer token"


@both
async def test_a_router_of_another_ca_gets_nothing(kind: str, tls: PublicCertificate, tmp_path: Path) -> None:
    double, other = RouterDouble(), new_folder(tmp_path / "other").ca_cert
    with pytest.raises(Unavailable):
        await answered(kind, double, tls, ca=other, api_key="k-4")
    assert double.requests == []


def test_a_key_that_no_header_may_have_is_refused_without_its_text() -> None:
    with pytest.raises(ValueError, match="expected printable ASCII") as caught:
        Client("127.0.0.1:1", api_key="secret\nx: y")
    assert "secret" not in str(caught.value)


async def test_commands_take_both_from_the_environment(
    folder: CertificateFolder, tls: PublicCertificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CA", str(folder.public.ca))
    monkeypatch.setenv("QUIRE_API_KEY", "k-5")
    double = RouterDouble()
    async with served(double, tls) as address, router_client(address) as client:
        await client.status()
    assert [each["authorization"] for each in double.metadata] == ["Bearer k-5"]


async def test_a_suite_of_the_commands_own_needs_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CA", "/nowhere")
    monkeypatch.setenv("QUIRE_API_KEY", "k-6")
    double = RouterDouble()
    async with served(double) as address, router_client(address, PLAIN) as client:
        await client.status()
    assert ["authorization" in each for each in double.metadata] == [False]


async def test_a_ca_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"QUIRE_CA: .*nowhere cannot be read: No such file"):
        async with router_client("127.0.0.1:1", ClientSettings(ca=tmp_path / "nowhere")):
            pass


async def test_the_admin_plane_opens_to_the_operators_certificate(tmp_path: Path) -> None:
    """It lies where `quire serve` has put it; without one there is no way in."""
    folder, double = new_folder(tmp_path / "certs"), RouterDouble()
    async with served(double, folder.role(Role.ROUTER).identity()) as address:
        for state_dir, inside in ((tmp_path, True), (tmp_path / "elsewhere", False)):
            try:
                async with admin_channel(address, state_dir) as channel:
                    await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest())
            except Unavailable:
                assert not inside
    assert len(double.metadata) == 1
