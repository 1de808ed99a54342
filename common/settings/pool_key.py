"""The key that the KV managers and the routers of a pool share: managers sign with it what discovery reads in Redis."""

from __future__ import annotations

from typing import Final

from pydantic import Field, SecretStr

from common.addresses.host_port import redis_addresses
from common.contracts.errors import FieldViolation, InvalidConfig
from common.settings.options import ServiceSettings, is_loopback

_SHORTEST: Final = 16


class PoolSettings(ServiceSettings):
    """options of the services that share a list of workers"""

    pool_key: SecretStr | None = Field(
        None,
        min_length=_SHORTEST,
        description="secret of the KV managers and routers of a pool: managers sign the addresses of workers with it",
        json_schema_extra={"secret": True},
    )


def pool_key_of(settings: PoolSettings) -> bytes | None:
    """Return the key; None without one, where all is on this machine. Raises InvalidConfig where one is needed."""
    if settings.pool_key is not None:
        return settings.pool_key.get_secret_value().encode()
    if not settings.redis_url:
        return None
    hosts = [settings.host, *(host for host, _ in redis_addresses(settings.redis_url))]
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond:
        what = (
            f"is missing, and {beyond[0]} is beyond loopback; expected a secret of at least {_SHORTEST} characters, "
            "equal on the KV manager and all routers: openssl rand -hex 32"
        )
        raise InvalidConfig(FieldViolation("QUIRE_POOL_KEY", what))
    return None
