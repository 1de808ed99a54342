"""The operator's file of tenants, in TOML: keys as hashes, weights, limits, shared cache domains, signed tokens.

[tenants.acme]
keys = ["sha256:..."]           # several while keys are exchanged
weight = 2
requests_per_minute = 600
adapters = ["acme-*"]           # names of its own adapters
adapter_bytes = 4_000_000_000   # of these in a worker's memory

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
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from common.contracts.adapters import OWN_NAME_WORDS, AdapterShare, is_own_name
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.lease import MAX_RETENTION_PRIORITY
from common.contracts.limits import MAX_OWN_ADAPTER_NAMES, MAX_TENANT_CHARS
from common.settings.config import expectation, mistake
from router.tenants.keys import check_hash
from router.tenants.tenancy import NO_OWNERS, AdapterOwners, Tenant, TenantLimits

if TYPE_CHECKING:
    from router.tenants.tokens import TokenReader

# Keys of a HMAC-SHA256 shorter than its digest weaken it.
SERVER_KEY_BYTES: Final = 32
_Name = Annotated[str, Field(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}$")]
_Count = Annotated[int, Field(ge=1)]


def _own_name(text: str) -> str:
    if not is_own_name(text):
        raise ValueError(f"{text[:64]!r} cannot name adapters; expected {OWN_NAME_WORDS}")
    return text


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
    adapters: Annotated[list[Annotated[str, AfterValidator(_own_name)]], Field(max_length=MAX_OWN_ADAPTER_NAMES)] = []
    adapter_bytes: _Count | None = None


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
    owners: AdapterOwners = field(default=NO_OWNERS, compare=False)
    tokens: TokenReader | None = None
    files: tuple[Path, ...] = ()


def read_tenants(path: Path, server_key: bytes) -> TenantTable:
    """Return the tenants of a file. Raises InvalidConfig with everything that is wrong in it."""
    content = _parsed(path)
    try:
        file = TenantsFile.model_validate(content)
    except ValidationError as error:
        raise InvalidConfig(*(_violation(path, each) for each in error.errors())) from None
    if wrong := [*_unknown_names(path, file), *_repeated_keys(path, file), *_adapter_problems(path, file)]:
        raise InvalidConfig(*wrong)
    owners = AdapterOwners(
        AdapterShare(name, tuple(entry.adapters), entry.adapter_bytes or 0) for name, entry in file.tenants.items()
    )
    tenants = {name: _tenant(name, entry, file, server_key, owners) for name, entry in file.tenants.items()}
    names = {key: name for name, entry in file.tenants.items() for key in entry.keys}
    if file.jwt is None:
        return TenantTable(tenants, names, owners)
    jwks = path.parent / file.jwt.jwks
    return TenantTable(tenants, names, owners, _token_reader(file.jwt, jwks), (jwks,))


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
    from router.tenants.tokens import TokenReader

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


def _adapter_problems(path: Path, file: TenantsFile) -> Iterator[FieldViolation]:
    if (clash := AdapterOwners.find_clash({name: entry.adapters for name, entry in file.tenants.items()})) is not None:
        tenant, name, other = clash
        yield FieldViolation(f"{path}: tenants.{tenant}.adapters", f"has {name!r}, which names adapters of {other} too")
    for name, entry in file.tenants.items():
        if entry.adapter_bytes is not None and not entry.adapters:
            what = "bounds the tenant's own adapters, and it has none; add adapters, such as"
            yield FieldViolation(f"{path}: tenants.{name}.adapter_bytes", f'{what} ["{name}-*"]')


def _tenant(name: str, entry: TenantEntry, file: TenantsFile, server_key: bytes, owners: AdapterOwners) -> Tenant:
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
        adapters=tuple(entry.adapters),
        owners=owners,
    )
