"""When a worker without a KV manager is no longer ready for new requests."""

from __future__ import annotations

from gpuworker.scheduling.manager_silence import ManagerAbsence

LOST = "the worker has had no KV manager for 4 s (--manager-patience)"


def test_a_worker_is_ready_from_its_first_session_until_it_has_had_none_for_long() -> None:
    absence = ManagerAbsence(4.0)
    told = [absence.why_not_ready(attached, now) for now, attached in enumerate([False, True, False, False, False])]
    assert told == ["the worker has no KV manager yet", "", "", "", ""]
    assert absence.why_not_ready(False, 5.0) == LOST
    assert absence.why_not_ready(False, 500.0) == LOST
    assert absence.why_not_ready(True, 501.0) == ""
    assert absence.why_not_ready(False, 504.9) == ""
    assert absence.why_not_ready(False, 505.0) == LOST


def test_a_worker_without_a_first_session_is_never_ready() -> None:
    absence = ManagerAbsence(4.0)
    assert {absence.why_not_ready(False, now) for now in (0.0, 3.0, 100.0)} == {"the worker has no KV manager yet"}
