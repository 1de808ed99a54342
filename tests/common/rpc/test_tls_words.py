"""What failed handshakes say: the texts of gRPC and of Python's ssl as they are, and commands against real servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

from cli.batch.runner import Runner, Target
from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder
from cli.client import ClientSettings, admin_channel, router_client
from common.contracts.errors import Unavailable
from common.rpc.roles import Role
from common.rpc.tls import PublicCertificate
from common.rpc.tls_words import tls_problem
from quire.inference.v1 import inference_pb2 as pb
from quire.inference.v1 import inference_pb2_grpc as rpc
from router.api.http.http_server import serve_http
from tests.support.certificates import expired, new_folder
from tests.support.fake_router import RouterDouble, served

_GRPC = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
_TLS = f"{_GRPC}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1: SSL routines:OPENSSL_internal:"
_HTTP = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{_TLS}CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK", "is not signed by the CA"),
        (f"{_HTTP}self-signed certificate in certificate chain (_ssl.c:1006)", "is not signed by the CA"),
        (f"{_TLS}CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "has expired; renew it"),
        (f"{_HTTP}certificate is not yet valid (_ssl.c:1006)", "is not valid yet; set the clocks"),
        (
            f"{_GRPC}Custom verification check failed with error: UNAUTHENTICATED: Hostname Verification Check failed.",
            "h",
        ),
        (f"{_HTTP}IP address mismatch, certificate is not valid for '127.0.0.1'. (_ssl.c:1006)", "names another host"),
        (f"{_HTTP}Hostname mismatch, certificate is not valid for 'a'. (_ssl.c:1006)", "names another host"),
        (f"{_TLS}WRONG_VERSION_NUMBER: Invalid certificate verification context: OK", "speaks no TLS"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", "speaks no TLS"),
        ("[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca (_ssl.c:2580)", "does not trust the CA"),
    ],
)
def test_each_mismatch_has_its_words(text: str, words: str) -> None:
    said = tls_problem(text, "host:1", with_tls=True)
    assert "what answers at host:1" in said
    assert words in said


@pytest.mark.parametrize(("with_tls", "words"), [(False, "asks for TLS"), (True, "does not take the certificate")])
def test_a_server_that_hangs_up_has_a_reason(with_tls: bool, words: str) -> None:
    for text in (f"{_GRPC}Socket closed", "Server disconnected without sending a response."):
        assert words in tls_problem(text, "host:1", with_tls)


@pytest.mark.parametrize("text", ["", "Socket closed", f"{_GRPC}Connection refused", "the router drains"])
def test_what_is_not_tls_has_no_words_here(text: str) -> None:
    assert tls_problem(text, "host:1", with_tls=True) == ""


async def status(address: str, **settings: Path) -> str:
    """Ask a public port for its status; return the error."""
    with pytest.raises(Unavailable) as caught:
        async with router_client(address, ClientSettings(**settings)) as client:
            await client.status()
    return str(caught.value)


async def test_the_public_port_of_another_ca_is_said_as_such(tmp_path: Path) -> None:
    folder, other = CertificateFolder(tmp_path / "public"), new_folder(tmp_path / "other").ca_cert
    make(folder, wanted(folder, [], public=["localhost"]))
    async with served(RouterDouble(), PublicCertificate.of(folder.public.cert, folder.public.key)) as address:
        at = f"the certificate of what answers at {address}"
        assert (
            await status(address, ca=other) == f"{at} is not signed by the CA that is trusted here; QUIRE_CA is {other}"
        )
        assert (await status(address, ca=folder.public.ca)).startswith(f"{at} names another host")
        plain = "closes the connection: most likely it asks for TLS; name the router's CA with QUIRE_CA"
        assert await status(address) == f"what answers at {address} {plain}"
    async with served(RouterDouble()) as address:
        assert (await status(address, ca=other)).startswith(f"what answers at {address} speaks no TLS")


async def operators(address: str, state_dir: Path) -> str:
    with pytest.raises(Unavailable) as caught:
        async with admin_channel(address, state_dir) as channel:
            await rpc.InferenceServiceStub(channel).GetStatus(pb.GetStatusRequest())
    return str(caught.value)


async def test_the_admin_plane_of_another_suite_is_said_as_such(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "one" / "certs")
    new_folder(tmp_path / "two" / "certs")
    async with served(RouterDouble(), folder.role(Role.ROUTER).identity()) as address:
        for state_dir, words in (("two", "is not signed by the CA that is trusted here"), ("none", "asks for TLS")):
            said = await operators(address, tmp_path / state_dir)
            assert words in said
            assert said.endswith(f"; name the --state-dir of its certificates, which is {tmp_path / state_dir} here")
    async with served(RouterDouble(), expired(folder, Role.ROUTER, tmp_path / "old").identity()) as address:
        assert "has expired" in await operators(address, tmp_path / "one")


async def test_a_batch_says_so_too(tmp_path: Path) -> None:
    folder, other = CertificateFolder(tmp_path / "public"), new_folder(tmp_path / "other").ca_cert
    make(folder, wanted(folder, [], public=["localhost"]))
    tls = PublicCertificate.of(folder.public.cert, folder.public.key)
    server, plain = await serve_http(FastAPI(), "127.0.0.1", 0, tls=tls), await serve_http(FastAPI(), "127.0.0.1", 0)
    for url, ca, words in (
        (f"https://localhost:{server.port}", other, "is not signed by the CA"),
        (f"https://127.0.0.1:{server.port}", folder.public.ca, "names another host"),
        (f"http://localhost:{server.port}", None, "most likely it asks for TLS"),
        (f"https://localhost:{plain.port}", other, "speaks no TLS"),
    ):
        with pytest.raises(Unavailable) as caught:
            await Runner(Target(url, ca=ca), lambda _: None).run(iter(()))
        assert words in str(caught.value)
        assert "QUIRE_CA" in str(caught.value)
    await server.stop()
    await plain.stop()
