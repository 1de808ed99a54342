"""The operator's file of tenants, in TOML: keys as hashes, weights, limits, shared cache domains, signed tokens.

[tenants.acme]
keys = ["sha256:..."]           # several while keys are exchanged
weight = 2
requests_per_minute = 600

[shared.handbook]               # a cache domain for public prompts
tenants = ["acme", "example"]   # without this line: every tenant

[jwt]                           # signed tokens beside keys
jwks = "jwks.json"
issuer = "https://login.example"
audience = "quire"
claim = "tenant"                # the claim with the tenant's name
"""

from __future__ import annotations

import hashlib
import hmac
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import jwt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from common.contracts.errors import FieldViolation, InvalidConfig, Unauthenticated
from common.contracts.lease import MAX_RETENTION_PRIORITY
from common.contracts.limits import MAX_TENANT_CHARS
from common.settings.config import expectation, mistake
from router.tenants.keys import check_hash
from router.tenants.tenancy import Tenant, TenantLimits

# Signed tokens (JWT) as credentials: the signer's public keys come from a JWKS file, the tenant from a claim.
# Only signatures with a public key count (RSA, ECDSA, Ed25519): with a shared secret, who checks a token could make
# one. A token must name its signer, its audience and its end. A token that ends lets its open requests go on; a key
# that is taken out of the JWKS file ends them.


ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
# Seconds by which the clocks of signer and router may differ.
LEEWAY_S: Final = 30
_REQUIRED: Final = ["exp", "iss", "aud"]


class TokenReader:
    """Checks tokens of one signer for one audience. `claim` is the name of the claim that has the tenant's name."""

    def __init__(self, jwks: Path, issuer: str, audience: str, claim: str) -> None:
        """Raises InvalidConfig for a file that is not a JWKS with a usable public key."""
        self._issuer, self._audience, self._claim = issuer, audience, claim
        self._keys = _read_keys(jwks)

    def read(self, token: str) -> tuple[str, str]:
        """Return the tenant's name and the credential of a token. Raises Unauthenticated with what is wrong with it."""
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            key = self._keys.get(key_id or "")
            if key is None:
                raise Unauthenticated("the token is signed with a key that is not known here")
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_S,
                options={"require": [*_REQUIRED, self._claim]},
            )
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"the token is not valid: {_words(error)}") from None
        name = claims[self._claim]
        if not isinstance(name, str):
            raise Unauthenticated(f"the token's claim {self._claim} must be a string")
        return name, f"jwt {key_id}"

    def knows(self, credential: str) -> bool:
        """Return whether the key of a credential that `read` returned is still in the file."""
        return credential.removeprefix("jwt ") in self._keys


def _words(error: jwt.InvalidTokenError) -> str:
    """Return why a token is wrong, without anything that the token says."""
    known: dict[type[Exception], str] = {
        jwt.ExpiredSignatureError: "its time is over",
        jwt.ImmatureSignatureError: "its time has not begun",
        jwt.InvalidSignatureError: "its signature is wrong",
        jwt.InvalidAudienceError: "it is for another audience",
        jwt.InvalidIssuerError: "it is from another issuer",
        jwt.MissingRequiredClaimError: "a claim is missing",
    }
    return next((words for kind, words in known.items() if isinstance(error, kind)), "it is malformed")


def _read_keys(path: Path) -> dict[str, jwt.PyJWK]:
    try:
        entries = json.loads(path.read_text())["keys"]
        keys = {entry["kid"]: jwt.PyJWK(entry) for entry in entries if entry.get("kty") != "oct"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, jwt.PyJWTError) as error:
        what = f"is not a JWKS with public keys that have a kid: {type(error).__name__}: {error}"
        raise InvalidConfig(FieldViolation(str(path), what)) from None
    keys = {key_id: key for key_id, key in keys.items() if key.algorithm_name in ALGORITHMS}
    if not keys:
        raise InvalidConfig(FieldViolation(str(path), f"has no key for signatures; expected one of {ALGORITHMS}"))
    return keys


if TYPE_CHECKING:
    from router.tenants.tenants_file import TokenReader

# Keys of a HMAC-SHA256 shorter than its digest weaken it.
SERVER_KEY_BYTES: Final = 32
_Name = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}$")]
_Count = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TenantEntry(_Strict):
    """One tenant of the file. Without keys a tenant is known by its tokens alone."""

    keys: list[Annotated[str, AfterValidator(check_hash)]] = []
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    max_priority: Annotated[int, Field(ge=-100, le=100)] = 0
    max_retention_priority: Annotated[int, Field(ge=0, le=MAX_RETENTION_PRIORITY)] = MAX_RETENTION_PRIORITY
    models: list[str] | None = None
    admin: bool = False
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    streams: _Count | None = None
    sequences: _Count | None = None


class SharedEntry(_Strict):
    """One shared cache domain, and the tenants that may use it; all of them where none is named."""

    tenants: list[str] | None = None


class TokenEntry(_Strict):
    """Whose tokens are accepted: the signer's public keys, as a file beside this one, and what a token must say."""

    jwks: Path
    issuer: Annotated[str, Field(min_length=1)]
    audience: Annotated[str, Field(min_length=1)]
    claim: Annotated[str, Field(min_length=1)] = "sub"


class TenantsFile(_Strict):
    """The whole file."""

    tenants: dict[_Name, TenantEntry] = Field(min_length=1)
    shared: dict[_Name, SharedEntry] = {}
    jwt: TokenEntry | None = None


@dataclass(frozen=True, slots=True)
class TenantTable:
    """The tenants of a file by name, and the name of each key's tenant by the key's hash.

    `files` are the files that this one names.
    """

    tenants: Mapping[str, Tenant]
    names_by_hash: Mapping[str, str]
    tokens: TokenReader | None = None
    files: tuple[Path, ...] = ()


def read_tenants(path: Path, server_key: bytes) -> TenantTable:
    """Return the tenants of a file. Raises InvalidConfig with everything that is wrong in it."""
    content = _parsed(path)
    try:
        file = TenantsFile.model_validate(content)
    except ValidationError as error:
        raise InvalidConfig(*(_violation(path, each) for each in error.errors())) from None
    if wrong := [*_unknown_names(path, file), *_repeated_keys(path, file)]:
        raise InvalidConfig(*wrong)
    tenants = {name: _tenant(name, entry, file, server_key) for name, entry in file.tenants.items()}
    names = {key: name for name, entry in file.tenants.items() for key in entry.keys}
    if file.jwt is None:
        return TenantTable(tenants, names)
    jwks = path.parent / file.jwt.jwks
    return TenantTable(tenants, names, _token_reader(file.jwt, jwks), (jwks,))


def read_server_key(path: Path) -> bytes:
    """Return the key that cache domains are derived with. Raises InvalidConfig for a short or unreadable one."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise InvalidConfig(FieldViolation("--server-key-file", f"cannot be read: {error}")) from None
    if len(key) < SERVER_KEY_BYTES:
        what = f"has {len(key)} bytes; expected at least {SERVER_KEY_BYTES} random ones: openssl rand -hex 32"
        raise InvalidConfig(FieldViolation("--server-key-file", what))
    return key


def cache_domain(server_key: bytes, kind: str, name: str) -> bytes:
    """Return the cache domain of a tenant, or of a shared name: it cannot be computed without the server key."""
    return hmac.new(server_key, f"quire-cache-domain\0{kind}\0{name}".encode(), hashlib.sha256).digest()


def _token_reader(entry: TokenEntry, jwks: Path) -> TokenReader:
    # Routers without tokens need no cryptography.
    from router.tenants.tenants_file import TokenReader

    return TokenReader(jwks, entry.issuer, entry.audience, entry.claim)


def _parsed(path: Path) -> object:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(FieldViolation(str(path), f"cannot be read ({error}); expected a TOML file")) from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(FieldViolation(str(path), f"is not valid TOML: {error}")) from None


def _violation(path: Path, problem: ErrorDetails) -> FieldViolation:
    """Return one mistake. A wrong hash is not repeated, because it may be a key."""
    place = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    return FieldViolation(f"{path}: {place}", expectation(problem) if "keys" in problem["loc"] else mistake(problem))


def _unknown_names(path: Path, file: TenantsFile) -> Iterator[FieldViolation]:
    for shared, entry in file.shared.items():
        for name in entry.tenants or ():
            if name not in file.tenants:
                yield FieldViolation(f"{path}: shared.{shared}.tenants", f"names {name!r}; no such tenant is here")


def _repeated_keys(path: Path, file: TenantsFile) -> Iterator[FieldViolation]:
    owners: dict[str, str] = {}
    for name, entry in file.tenants.items():
        for key in entry.keys:
            if owners.setdefault(key, name) != name:
                yield FieldViolation(f"{path}: tenants.{name}.keys", f"has a key of tenant {owners[key]} too")


def _tenant(name: str, entry: TenantEntry, file: TenantsFile, server_key: bytes) -> Tenant:
    open_to = [shared for shared, each in file.shared.items() if each.tenants is None or name in each.tenants]
    return Tenant(
        name=name,
        weight=entry.weight,
        max_priority=entry.max_priority,
        max_retention_priority=entry.max_retention_priority,
        models=None if entry.models is None else frozenset(entry.models),
        admin=entry.admin,
        limits=TenantLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.streams, entry.sequences),
        cache_domain=cache_domain(server_key, "tenant", name),
        shared_domains=tuple([(shared, cache_domain(server_key, "shared", shared)) for shared in open_to]),
    )
