"""The plan and the results of a load benchmark's client process; both cross process borders as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Api = Literal["grpc", "http", "direct"]
FINISHED: Final = "OK"
UNFINISHED: Final = "UNFINISHED"


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of one client. Times are in seconds on the clock that all processes share (`time.monotonic`).

    Arrivals begin at `start`; they are those of the whole load, of which this client takes every `clients`-th. With
    `streams` > 0 the loop is closed instead: as many requests are kept running until `seconds` have passed. With
    `opening` > 0 the `streams` are opened at that rate, once, and followed to their end. `patience`: seconds after the
    last arrival until remaining requests are cancelled. `check`: the checkpoint of the simulated tokens, "" for none.
    `certs`: the folder of the certificate with which `direct` calls a worker, "" for none.
    """

    api: Api
    address: str
    start: float
    seconds: float
    rate: float
    output_tokens: int
    results: str
    prompt_tokens: int = 64
    cv: float = 1.0
    seed: int = 0
    client: int = 0
    clients: int = 1
    channels: int = 4
    streams: int = 0
    opening: float = 0.0
    patience: float = 30.0
    vocabulary: int = 1000
    check: str = ""
    certs: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Plan:
        return Plan(**json.loads(line))


@dataclass(slots=True)
class Trace:
    """One request as its client saw it. `times` and `counts` have the time and the tokens of each message."""

    intended: float
    sent: float = 0.0
    done: float = 0.0
    status: str = UNFINISHED
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, now: float, count: int) -> None:
        """Record tokens that came together."""
        self.times.append(now)
        self.counts.append(count)


@dataclass(slots=True)
class Seen:
    """All requests of a run as columns, R of them with M messages in all; `first` [R + 1] cuts messages by request.

    `cpu` is the processor time that the clients took, each over the seconds of the run: the share of a core.
    """

    intended: Floats
    sent: Floats
    done: Floats
    status: npt.NDArray[np.str_]
    first: Integers
    times: Floats
    counts: Integers
    faults: list[str] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @staticmethod
    def of(traces: Sequence[Trace], cpu: float = 0.0) -> Seen:
        messages = [len(trace.times) for trace in traces]
        return Seen(
            intended=np.array([trace.intended for trace in traces], dtype=np.float64),
            sent=np.array([trace.sent for trace in traces], dtype=np.float64),
            done=np.array([trace.done for trace in traces], dtype=np.float64),
            status=np.array([trace.status for trace in traces], dtype=np.str_),
            first=np.concatenate(([0], np.cumsum(messages, dtype=np.int64))),
            times=np.array([time for trace in traces for time in trace.times], dtype=np.float64),
            counts=np.array([count for trace in traces for count in trace.counts], dtype=np.int64),
            faults=[fault for trace in traces for fault in trace.faults],
            cpu=[cpu],
        )

    @staticmethod
    def joined(parts: Sequence[Seen]) -> Seen:
        starts = np.cumsum([0] + [len(part.times) for part in parts])
        first = [part.first[:-1] + start for part, start in zip(parts, starts, strict=False)]
        return Seen(
            intended=np.concatenate([part.intended for part in parts]),
            sent=np.concatenate([part.sent for part in parts]),
            done=np.concatenate([part.done for part in parts]),
            status=np.concatenate([part.status for part in parts]),
            first=np.concatenate([*first, starts[-1:]]),
            times=np.concatenate([part.times for part in parts]),
            counts=np.concatenate([part.counts for part in parts]),
            faults=[fault for part in parts for fault in part.faults],
            cpu=[share for part in parts for share in part.cpu],
        )

    def save(self, path: str) -> None:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        np.savez(path, faults=np.array(self.faults, dtype=np.str_), cpu=np.array(self.cpu), **columns)

    @staticmethod
    def load(path: str) -> Seen:
        with np.load(path) as found:
            columns = {name: found[name] for name in _COLUMNS}
            return Seen(**columns, faults=found["faults"].tolist(), cpu=found["cpu"].tolist())


_COLUMNS: Final = ("intended", "sent", "done", "status", "first", "times", "counts")
