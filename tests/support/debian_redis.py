"""Debian's Redis: an older version than the bundled server, and built with TLS."""

from __future__ import annotations

import shutil
from pathlib import Path

import redis

from cli.certificates.authority import make, wanted
from cli.certificates.folder import CertificateFolder, Leaf
from common.process.local_redis import LocalRedis
from common.process.redis_client import redis_tls
from common.process.redis_users import MANAGER, OPERATOR, ROUTER, RedisUrls, RedisUsers

INSTALLED = shutil.which("redis-server") or shutil.which("redis-check-rdb")
NOT_INSTALLED = "Debian's Redis is not installed: apt-get install redis-tools"


def program(folder: Path) -> Path:
    """Return the server. In redis-tools it has another name; the name by which it is called decides what it does.

    So it is found here alone: all other tests keep the bundled server.
    """
    assert INSTALLED is not None
    link = folder / "redis-server"
    if not link.exists():
        link.symlink_to(INSTALLED)
    return link


def redis_leaf(folder: Path) -> Leaf:
    """Return a certificate for a Redis on this host."""
    certificates = CertificateFolder(folder / "certificates")
    make(certificates, wanted(certificates, [], public=["localhost", "127.0.0.1"]))
    return certificates.public


class DebianRedis(LocalRedis):
    """Debian's server with Quire's users; with `leaf` it speaks TLS alone."""

    def __init__(self, folder: Path, users: RedisUsers, leaf: Leaf | None = None) -> None:
        super().__init__(users=users, acl_file=users.write_acl(folder / "redis.acl"))
        self._program, self._leaf = program(folder), leaf
        self.ca = None if leaf is None else leaf.ca
        if leaf is not None:
            urls = (users.url(name, f"127.0.0.1:{self.port}") for name in (MANAGER, ROUTER, OPERATOR))
            self.urls = RedisUrls(*(url.replace("redis://", "rediss://", 1) for url in urls))

    @property
    def url(self) -> str:
        return f"redis{'' if self._leaf is None else 's'}://127.0.0.1:{self.port}/0"

    def argv(self) -> list[str]:
        argv = [str(self._program), *super().argv()[1:]]
        if self._leaf is None:
            return argv
        files = {"cert": self._leaf.cert, "key": self._leaf.key, "ca-cert": self._leaf.ca}
        tls = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
        return [*argv, "--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *tls]

    def answers(self, pid: int) -> bool:
        with redis.Redis.from_url(self.urls.operator, socket_timeout=1.0, **redis_tls(self.ca)) as client:
            try:
                return bool(client.info("server")["process_id"] == pid)
            except redis.RedisError:
                return False
