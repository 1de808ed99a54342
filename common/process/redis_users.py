"""The users of a Redis that Quire has for itself: each may do what its service does, and nothing else.

`python -m common.process.redis_users DIR` writes, once, what containers need. DIR/redis/users.acl has the rules for
Redis. DIR/manager and DIR/router have the URL of Redis and the key of the pool.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MANAGER, ROUTER, OPERATOR = "manager", "router", "operator"

# Not CLIENT SETINFO: Redis before 7.2, Debian's, refuses rules that name it. redis-py goes on without it.
_CONNECT: Final = "+ping +hello +auth +select +client|setname"
_RULES: Final = {
    # Everybody: health checks send PING without a name.
    "default": "nopass resetkeys resetchannels -@all +ping",
    # The scripts of kvmanager/index, with the commands inside them, and the list of workers.
    MANAGER: f"resetkeys ~quire:* ~{{quire:* -@all {_CONNECT} +get +set +mget +del +exists +hget +hset +sadd +srem "
    "+srandmember +eval +evalsha +script|load",
    # The router reads. It writes the stored responses of router/api/openai/responses/store.py, and the notices of
    # router/workers/load_sharing.py, alone.
    ROUTER: f"resetkeys %R~quire:* %R~{{quire:* ~quire-responses:* ~quire-load:* -@all {_CONNECT} +getrange +hmget "
    "+hstrlen +scard +srandmember +memory|usage +eval_ro +eval +time +get +set +del +hget +hset +hdel +incrby +decrby "
    "+zadd +zrem +zcard +zscore +zincrby +zrange +zrangebyscore +zrevrange +xadd +xread +pexpire",
    # People: all data, and no settings. No service has this password.
    OPERATOR: "~* &* +@all -@admin",
}


def _password() -> str:
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class RedisUsers:
    """Passwords by user."""

    passwords: dict[str, str] = field(
        default_factory=lambda: {name: _password() for name in (MANAGER, ROUTER, OPERATOR)}, repr=False
    )

    def acl(self) -> str:
        """Return the content of Redis's ACL file. It has hashes of the passwords."""
        return "".join(f"user {name} on {self._secret(name)}{rules}\n" for name, rules in _RULES.items())

    def url(self, name: str, address: str) -> str:
        """Return the URL by which a user reaches the Redis at HOST:PORT."""
        return f"redis://{name}:{self.passwords[name]}@{address}/0"

    def write_acl(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, self.acl())
        return path

    def _secret(self, name: str) -> str:
        known = self.passwords.get(name)
        return f"#{hashlib.sha256(known.encode()).hexdigest()} " if known else ""


@dataclass(frozen=True, slots=True)
class RedisUrls:
    """The URL of Redis for each user; "" where there is no Redis."""

    manager: str = field(repr=False)
    router: str = field(repr=False)
    operator: str = field(repr=False)

    @staticmethod
    def same(url: str) -> RedisUrls:
        return RedisUrls(url, url, url)

    @staticmethod
    def of(users: RedisUsers, address: str) -> RedisUrls:
        return RedisUrls(*(users.url(name, address) for name in (MANAGER, ROUTER, OPERATOR)))


def write_secrets(folder: Path, address: str) -> bool:
    """Write the files of all users; return False when they stand there already."""
    acl = folder / "redis" / "users.acl"
    if acl.exists():
        return False
    users, pool_key = RedisUsers(), _password()
    for name in (MANAGER, ROUTER, OPERATOR):
        (folder / name).mkdir(parents=True, exist_ok=True)
        _write(folder / name / "redis-url", users.url(name, address))
    for name in (MANAGER, ROUTER):
        _write(folder / name / "pool-key", pool_key)
    users.write_acl(acl)  # last: it says that all is there
    return True


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m common.process.redis_users", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--redis", default="redis:6379", metavar="HOST:PORT", help="where the services reach Redis")
    args = parser.parse_args(None if argv is None else list(argv))
    written = write_secrets(args.folder, args.redis)
    print(f"{args.folder}: {'written' if written else 'kept as it is'}")  # noqa: T201


if __name__ == "__main__":
    main()
