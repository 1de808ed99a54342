"""Plain text stays on this machine unless --insecure says otherwise, and TLS options come as a whole."""

from __future__ import annotations

import pytest

from common.contracts.errors import InvalidConfig
from common.settings.config import load
from common.settings.options import ServiceSettings, is_loopback
from gpuworker.config import GpuWorkerSettings
from kvmanager.config import KvManagerSettings
from router.config import RouterSettings

SERVICES = [RouterSettings, KvManagerSettings, GpuWorkerSettings]
TLS = ("--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c")

each_service = pytest.mark.parametrize("service", SERVICES)


def refused(service: type[ServiceSettings], *words: str, **environ: str) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        load(service, ("--model", "m", *words), environ)
    return {each.field: each.description for each in caught.value.violations}


def internal(service: type[ServiceSettings]) -> str:
    """Return the option that names where a service listens for the other services."""
    return "--admin-host" if service is RouterSettings else "--host"


@each_service
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "kvmanager"])
def test_plain_text_beyond_loopback_is_refused(service: type[ServiceSettings], host: str) -> None:
    assert refused(service, internal(service), host) == {
        internal(service): f"is {host!r}, beyond loopback, without TLS; "
        "expected --tls-cert, --tls-key and --tls-ca (`quire certs` makes them), or --insecure"
    }


@each_service
@pytest.mark.parametrize("allowed", [("--insecure",), TLS])
def test_it_is_allowed_with_tls_or_in_so_many_words(service: type[ServiceSettings], allowed: tuple[str, ...]) -> None:
    assert load(service, ("--model", "m", internal(service), "0.0.0.0", *allowed), {}).internal_host()[1] == "0.0.0.0"


def test_public_ports_may_be_plain_text_anywhere() -> None:
    assert load(RouterSettings, ("--model", "m", "--host", "0.0.0.0"), {}).host == "0.0.0.0"


@each_service
def test_the_option_is_named_as_it_was_given(service: type[ServiceSettings]) -> None:
    name = "QUIRE_" + internal(service)[2:].upper().replace("-", "_")
    assert set(refused(service, **{name: "0.0.0.0"})) == {name}


def test_what_a_service_calls_counts_too() -> None:
    assert set(refused(GpuWorkerSettings, "--manager", "kvmanager:50052")) == {"--manager"}
    assert set(refused(RouterSettings, "--worker", "127.0.0.1:1", "--worker", "10.0.0.7:1")) == {"--worker"}
    assert set(refused(RouterSettings, "--sibling", "10.0.0.7:1")) == {"--sibling"}


@each_service
def test_a_part_of_the_tls_options_is_no_tls(service: type[ServiceSettings]) -> None:
    assert refused(service, "--tls-key", "b") == {
        "--tls-cert": "is missing; expected together with --tls-key",
        "--tls-ca": "is missing; expected together with --tls-key",
    }


def test_a_public_certificate_needs_its_key() -> None:
    assert set(refused(RouterSettings, "--public-tls-cert", "a")) == {"--public-tls-key"}


def test_a_ca_for_redis_needs_a_redis_with_tls() -> None:
    assert set(refused(KvManagerSettings, "--redis-ca", "a", "--redis-url", "redis://127.0.0.1:1")) == {"--redis-ca"}
    assert load(KvManagerSettings, ("--redis-ca", "a", "--redis-url", "rediss://redis:1"), {}).redis_ca is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost.evil.example", "127.0.0.1.evil.example", ""])
def test_what_only_looks_like_loopback(host: str) -> None:
    assert not is_loopback(host)
