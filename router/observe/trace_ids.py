"""Ids of traces: an API may choose that of the trace that a request begins, to name it in answers of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

_CHOSEN: Final = ContextVar("chosen_trace_id", default=0)


class ChosenTraceIds(RandomIdGenerator):
    """Gives a trace the id that `beginning` chose, else a random one."""

    def generate_trace_id(self) -> int:
        return _CHOSEN.get() or super().generate_trace_id()


@contextmanager
def beginning(trace_id: str) -> Iterator[None]:
    """Let a trace that begins within the block have this id, in hexadecimal; "" chooses none."""
    token = _CHOSEN.set(int(trace_id or "0", 16))
    try:
        yield
    finally:
        _CHOSEN.reset(token)
