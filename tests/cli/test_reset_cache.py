"""The words and the JSON of `quire reset-cache`."""

from __future__ import annotations

from cli.commands.reset_cache import as_json, in_words
from quire.kvmanager.v1 import kvmanager_pb2 as pb

ONE = pb.WorkerReset(worker_id="worker-0", dropped_blocks=31, blocks_in_use=4, confirmed=True)
LATE = pb.WorkerReset(worker_id="worker-1", dropped_blocks=2, blocks_in_use=0, confirmed=False)


def test_the_words_say_what_went_what_stays_and_what_is_late() -> None:
    answer = pb.ResetPrefixCacheResponse(dropped_blocks=33, workers=[ONE, LATE], index_current=False)
    assert in_words(answer).splitlines() == [
        "dropped 33 cached blocks",
        "  worker-0: 31 dropped, 4 in use stay",
        "  worker-1: 2 dropped, 0 in use stay; not confirmed yet: its blocks are dropped when it attaches again",
        "  the index in Redis still has the blocks; it forgets them once Redis can be reached",
    ]


def test_a_pool_without_workers_is_said() -> None:
    words = in_words(pb.ResetPrefixCacheResponse(index_current=True))
    assert "no worker is attached" in words


def test_json_has_numbers() -> None:
    answer = pb.ResetPrefixCacheResponse(dropped_blocks=31, workers=[ONE], index_current=True)
    worker = {"worker_id": "worker-0", "dropped_blocks": 31, "blocks_in_use": 4, "confirmed": True}
    expected = {"dropped_blocks": 31, "workers": [worker], "index_current": True, "unheard_managers": []}
    assert as_json(answer) == expected
    answer.unheard_managers.append("10.0.0.9:50052")
    assert "10.0.0.9:50052 has not answered since the router's start" in in_words(answer)
