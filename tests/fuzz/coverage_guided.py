"""`python -m tests.fuzz.coverage_guided [OPTIONS]` fuzzes all decoders with atheris, which follows coverage.

The first byte of an input chooses the decoder. Only our own code is instrumented: it is imported here.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["common", "gpuworker", "kvmanager", "quire.api", "router"]):
    from tests.fuzz.decoders import DECODERS

_NAMES = sorted(DECODERS)


def take(content: bytes) -> None:
    """Give an input to its decoder."""
    if content:
        DECODERS[_NAMES[content[0] % len(_NAMES)]].take(content[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, take)
    atheris.Fuzz()
