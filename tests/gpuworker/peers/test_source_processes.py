"""A source that is killed or stopped in the middle of a fetch, as a process of its own."""

from __future__ import annotations

import signal

import pytest

from common.contracts.transfers import TransferEnd
from gpuworker.peers.carriers import host_key
from gpuworker.peers.client import ClientLimits
from tests.support.gpuworker.peers import HELD, Destination, SourceProcess, ends_of, hashes_of, serving

DONE, FAILED = TransferEnd.DONE, TransferEnd.FAILED
# The source answers the first three, and holds the others back.
WANTED = hashes_of(3) + hashes_of(5, HELD)
CARRIERS = pytest.mark.parametrize("shared", [b"", host_key()], ids=["tcp", "shm"])


@CARRIERS
def test_blocks_come_from_another_process(shared: bytes) -> None:
    with SourceProcess() as process, Destination(host_key=shared) as destination:
        destination.fetch(process.port, WANTED)
        assert ends_of(destination.landed(3)) == [DONE] * 3
        process.release()
        assert ends_of(destination.landed(5)) == [DONE] * 5
        assert destination.client.fetched() == {"shm" if shared else "tcp": 8}


@CARRIERS
def test_what_a_killed_source_had_not_sent_has_failed_and_others_serve_on(shared: bytes) -> None:
    with SourceProcess() as process, serving() as other, Destination(host_key=shared) as destination:
        destination.fetch(process.port, WANTED)
        assert ends_of(destination.landed(3)) == [DONE] * 3
        process.signal(signal.SIGKILL)
        assert ends_of(destination.landed(5)) == [FAILED] * 5
        process.wait()
        assert destination.fetched(process.port, WANTED) == [FAILED] * 8
        assert destination.fetched(other.port, hashes_of(3)) == [DONE] * 3


@CARRIERS
def test_a_stopped_source_fails_what_is_open_and_is_asked_again_once_it_goes_on(shared: bytes) -> None:
    bounds = ClientLimits(shunned_seconds=0.01)
    with SourceProcess() as process, Destination(bounds=bounds, host_key=shared) as destination:
        assert destination.fetched(process.port, hashes_of(3)) == [DONE] * 3
        destination.fetch(process.port, WANTED, patience=1.0)
        process.signal(signal.SIGSTOP)
        found = ends_of(destination.landed(8))
        assert found[3:] == [FAILED] * 5
        assert set(found[:3]) <= {DONE, FAILED}
        # A connection that it cannot accept, or a request that it does not read, waits for the patience and no longer.
        assert destination.fetched(process.port, hashes_of(2), patience=0.05) == [FAILED] * 2
        process.signal(signal.SIGCONT)
        process.release()
        while (again := destination.fetched(process.port, WANTED)) != [DONE] * 8:
            assert again == [FAILED] * 8  # not asked yet
