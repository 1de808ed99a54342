"""Signed tokens: which are accepted, for which tenant, and until when."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from common.contracts.errors import InvalidConfig, PermissionDenied, Unauthenticated
from router.tenants.directory import TenantDirectory

SIGNER, OTHER = (generate_private_key(SECP256R1()) for _ in range(2))
FILE = """
[tenants.acme]
[tenants.example]
[jwt]
jwks = "jwks.json"
issuer = "https://login.example"
audience = "quire"
claim = "tenant"
"""


def jwks(**keys: Any) -> str:
    """Return a JWKS of public keys by their id."""
    entries = [
        jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": name, "alg": "ES256"}
        for name, key in keys.items()
    ]
    return json.dumps({"keys": entries})


def token(key: Any = SIGNER, kid: str | None = "one", algorithm: str = "ES256", **claims: Any) -> str:
    given = {"iss": "https://login.example", "aud": "quire", "exp": time.time() + 600, "tenant": "acme"} | claims
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({name: value for name, value in given.items() if value is not None}, key, algorithm, headers)


@pytest.fixture
def directory(tmp_path: Path) -> TenantDirectory:
    (tmp_path / "jwks.json").write_text(jwks(one=SIGNER))
    (tmp_path / "tenants.toml").write_text(FILE)
    return TenantDirectory(tmp_path / "tenants.toml", b"k" * 32, "demo")


def test_a_token_names_its_tenant(directory: TenantDirectory) -> None:
    caller = directory.caller(f"Bearer {token(tenant='example')}", "")
    assert caller.tenant.name == "example"
    assert directory.is_live(caller)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"exp": 1}, "its time is over"),
        ({"exp": None}, "a claim is missing"),
        ({"tenant": None}, "a claim is missing"),
        ({"nbf": 10**11}, "its time has not begun"),
        ({"aud": "another"}, "another audience"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"key": OTHER}, "its signature is wrong"),
        ({"kid": "two"}, "not known here"),
        ({"kid": None}, "not known here"),
        ({"tenant": 7}, "must be a string"),
    ],
)
def test_a_token_with_a_wrong_claim_or_key_is_refused(
    directory: TenantDirectory, claims: dict[str, Any], words: str
) -> None:
    assert_refused(directory, token(**claims), words)


def test_what_is_no_token_is_refused(directory: TenantDirectory) -> None:
    assert_refused(directory, "a.b.c", "malformed")
    assert_refused(directory, f"{token()}x", "its signature is wrong|malformed")


def assert_refused(directory: TenantDirectory, wrong: str, words: str) -> None:
    with pytest.raises(Unauthenticated, match=words) as refused:
        directory.caller(f"Bearer {wrong}", "")
    assert "evil" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_a_token_without_a_public_key_signature_is_refused(directory: TenantDirectory, algorithm: str) -> None:
    forged = token("" if algorithm == "none" else "s" * 32, algorithm=algorithm)
    with pytest.raises(Unauthenticated):
        directory.caller(f"Bearer {forged}", "")


def test_a_tenant_that_the_file_does_not_have_is_denied(directory: TenantDirectory) -> None:
    with pytest.raises(PermissionDenied, match="tenant is not known here"):
        directory.caller(f"Bearer {token(tenant='stranger')}", "")


async def test_a_key_that_left_the_jwks_ends_its_callers(directory: TenantDirectory, tmp_path: Path) -> None:
    caller = directory.caller(f"Bearer {token()}", "")
    (tmp_path / "jwks.json").write_text(jwks(two=OTHER))
    assert await directory._reread()
    assert not directory.is_live(caller)
    assert directory.caller(f"Bearer {token(OTHER, 'two')}", "").tenant.name == "acme"


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"keys": []}', '{"keys": [{"kty": "oct", "kid": "a", "k": "c2VjcmV0"}]}', '{"keys": [{"kid": 1}]}'],
)
def test_a_file_without_public_keys_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "jwks.json").write_text(text)
    (tmp_path / "tenants.toml").write_text(FILE)
    with pytest.raises(InvalidConfig, match=r"jwks\.json"):
        TenantDirectory(tmp_path / "tenants.toml", b"k" * 32, "demo")
