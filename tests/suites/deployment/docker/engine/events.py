"""The engine's events of a project's containers, collected as they happen: it keeps only its last 256 events."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

_SERVICE: Final = "com.docker.compose.service"
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a container of a service, at a second of the clock."""

    action: str
    service: str
    at: float
    exit_code: int
    signal: int


@dataclass(slots=True)
class Events:
    """The events `die` and `kill` since `watch`, in order."""

    seen: list[Event] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @classmethod
    @contextmanager
    def watch(cls, project: str) -> Iterator[Self]:
        """Collect for the length of the block."""
        events = cls()
        label = f"label=com.docker.compose.project={project}"
        filters = [word for each in (label, "event=die", "event=kill") for word in ("--filter", each)]
        command = ["docker", "events", "--format", "{{json .}}", *filters]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as docker:
            reader = threading.Thread(target=events._read, args=(docker,))
            reader.start()
            try:
                yield events
            finally:
                docker.terminate()
                reader.join()

    def _read(self, docker: subprocess.Popen[str]) -> None:
        assert docker.stdout is not None
        for line in docker.stdout:
            event = json.loads(line)
            attributes = event["Actor"]["Attributes"]
            found = Event(
                action=event["Action"],
                service=attributes[_SERVICE],
                at=event["timeNano"] / 1e9,
                exit_code=int(attributes.get("exitCode", 0)),
                signal=int(attributes.get("signal", 0)),
            )
            with self._changed:
                self.seen.append(found)
                self._changed.notify_all()

    def ends(self, until: Callable[[list[tuple[str, int]]], bool]) -> list[tuple[str, int]]:
        """Wait until the ends fulfil a condition; return service and exit code of each process that ended."""

        def ended() -> list[tuple[str, int]]:
            return [(event.service, event.exit_code) for event in self.seen if event.action == "die"]

        with self._changed:
            assert self._changed.wait_for(lambda: until(ended()), _PATIENCE_S), ended()
            return ended()

    def told_to_stop(self, service: str) -> float:
        """Return when a service was last sent SIGTERM, in seconds of the clock."""
        with self._changed:
            return max(
                each.at for each in self.seen if (each.action, each.service, each.signal) == ("kill", service, 15)
            )
