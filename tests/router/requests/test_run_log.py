"""What a request's last record says of its time, by the events of its workers and when they were read."""

from __future__ import annotations

from dataclasses import replace

from common.contracts.clock import ManualClock
from common.contracts.transfers import Fetched
from common.contracts.types import Decision, DecisionKind, FinishReason, MissReason, SamplingParams, Usage
from common.process.standstill import Standstill
from router.contracts.events import Finished, Timings, ValidatedRequest
from router.contracts.index_answer import NOTHING_ASKED
from router.observe.diagnosis.outcome import figures_of, outcome_of, texts_of
from router.requests.run_log import RunLog
from router.workers.worker_events import (
    Lost,
    Preempted,
    SequenceAdmitted,
    SequenceDelayed,
    SequenceFinished,
    SequenceStarted,
    TokensSampled,
    WorkerTime,
)

# What the worker's clock says when that of the router says 0.
OTHER_CLOCK = 5000.0


class Told:
    """A request that came at 0 s, was read until 1 s and went to a worker at 2 s; the worker has it at once."""

    def __init__(self, *still: tuple[float, float], sequences: int = 1) -> None:
        self.clock = ManualClock()
        request = ValidatedRequest((1, 2, 3), SamplingParams(n=sequences), 0.0)
        self.standstill = Standstill()
        for span in still:
            self.standstill.add(*span)
        self.log = RunLog(request, self.clock, self.standstill)
        self.clock.now = 1.0
        self.log.read()
        self.clock.now = 2.0
        self.log.placed(NOTHING_ASKED)
        for index in range(sequences):
            self.log.submitted(index)

    def admitted(self, done: float, index: int = 0, read: float | None = None, **more: float) -> None:
        waited = done - 2.0
        event = SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", waited, when=at(done, more.pop("lost", 0.0)), **more)  # type: ignore[arg-type]
        self.follow(event, done if read is None else read, index)

    def follow(self, event: object, read: float, index: int = 0) -> None:
        """Let an event be read at a time."""
        self.clock.now = read
        self.log.follow(index, event)  # type: ignore[arg-type]

    def seconds(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds before and after the first token, to a hundredth; none of those before 2 s."""
        outcome = self.log.outcome("", "w0", 1)
        before, after = ({name: round(s, 2) for name, s in part} for part in (outcome.before, outcome.after))
        assert (before.pop("reading"), before.pop("queue")) == (1.0, 1.0)
        return before, after


def at(done: float, lost: float = 0.0) -> WorkerTime:
    """Return a time of the worker; it was so late by the router's clock."""
    return WorkerTime(OTHER_CLOCK + done, lost)


def end(done: float, lost: float = 0.0) -> SequenceFinished:
    return SequenceFinished(FinishReason.LENGTH, Usage(), when=at(done, lost))


def tokens(done: float, lost: float = 0.0) -> TokensSampled:
    return TokensSampled((7,), when=at(done, lost))


def test_a_router_that_stood_still_is_no_time_of_the_worker_that_had_finished() -> None:
    """The worker is done after 0.31 s; the router reads all of it at once, 1.5 s after it had sent the request."""
    told = Told((2.0, 3.5))
    told.admitted(2.01, read=3.5)
    told.follow(SequenceStarted(0.0, 0, "", at(2.2)), 3.5)
    told.follow(tokens(2.3), 3.5)
    told.follow(end(2.31), 3.5)
    assert told.seconds() == ({"router_still": 1.2, "blocks": 0.01, "prefill": 0.29}, {})


def test_a_slow_network_is_no_time_of_the_worker() -> None:
    told = Told()
    told.admitted(2.1, read=2.6)
    told.follow(tokens(2.4), 2.9)
    told.follow(end(3.4), 4.4)
    assert told.seconds() == ({"on_the_way": 0.5, "blocks": 0.1, "prefill": 0.3}, {"decode": 1.0, "on_the_way": 0.5})


def test_a_worker_that_stood_still_is_no_time_of_its_phases() -> None:
    told = Told()
    told.admitted(3.0, lost=0.75, lost_seconds=0.75)
    told.follow(SequenceStarted(0.25, 9, "huge", at(5.0, 1.75)), 5.0)
    told.follow(tokens(5.0, 1.75), 5.0)
    told.follow(end(8.0, 3.75), 8.0)
    before = {"worker_still": 1.75, "blocks": 0.25, "prefill_wait": 0.25, "prefill": 0.75}
    assert told.seconds() == (before, {"worker_still": 2.0, "decode": 1.0})


def test_a_worker_that_stood_still_before_it_read_a_request_held_that_up() -> None:
    told = Told()
    told.follow(SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", 0.5, unread_seconds=9.0, when=at(4.5)), 4.5)
    told.follow(tokens(5.0), 5.0)
    assert told.seconds() == ({"worker_still": 2.0, "blocks": 0.5, "prefill": 0.5}, {})


def test_a_lost_second_of_several_sequences_is_one() -> None:
    told = Told(sequences=2)
    told.admitted(2.5)
    told.admitted(2.5, index=1)
    for index in (0, 1):
        told.follow(tokens(4.5, 1.0), 4.5, index)
    assert told.seconds() == ({"worker_still": 1.0, "blocks": 0.5, "prefill": 1.0}, {})


def test_delays_that_come_before_an_admission_are_of_the_wait_that_it_ends() -> None:
    told = Told()
    told.follow(SequenceDelayed(manager_away_seconds=1.0, when=at(4.0)), 4.5)
    told.follow(SequenceDelayed(compile_seconds=0.25, when=at(4.0)), 4.5)
    told.admitted(4.0, read=4.5)
    told.follow(tokens(4.25), 4.75)
    assert told.seconds() == (
        {"constraint": 0.25, "on_the_way": 0.5, "blocks": 0.75, "manager_away": 1.0, "prefill": 0.25},
        {},
    )


def test_a_request_that_ends_before_its_admission_keeps_what_held_it_up() -> None:
    told = Told()
    told.follow(SequenceDelayed(manager_away_seconds=1.0, when=at(4.0)), 4.5)
    assert told.seconds() == ({"blocks": 1.5, "manager_away": 1.0}, {})


def test_a_stop_text_ends_the_work_at_the_token_that_completes_it() -> None:
    """The worker went on until the router told it to stop. What follows is the router's, and the client's reading."""
    told = Told()
    told.admitted(2.5)
    told.follow(tokens(3.0), 3.0)
    told.follow(tokens(3.25), 3.25)
    told.follow(tokens(3.5), 4.5)
    told.log.hands_over()
    told.log.sequence_ended(Finished(0, FinishReason.STOP, Usage(), Timings(0.0, 0.0, 0.0, 0.0), "end"))
    told.clock.now = 6.5
    told.log.taken()
    told.clock.now = 6.75
    assert told.seconds()[1] == {"decode": 0.5, "on_the_way": 1.0, "client": 2.0, "sending": 0.25}


def test_a_client_is_not_slow_while_the_router_stood_still() -> None:
    told = Told((5.0, 7.0))
    told.admitted(2.5)
    told.follow(tokens(3.0), 3.0)
    told.follow(end(4.0), 4.0)
    told.log.hands_over()
    told.clock.now = 8.0
    told.log.taken()
    assert told.seconds()[1] == {"router_still": 2.0, "decode": 1.0, "client": 2.0}
    assert told.log.outcome("", "w0", 1).client_longest == 2.0


def test_a_preemption_and_a_move_begin_when_the_worker_says_so() -> None:
    told = Told()
    told.admitted(2.5)
    told.follow(tokens(3.0), 3.0)
    told.follow(Preempted(at(3.5)), 4.0)
    told.admitted(4.5, read=5.0)
    told.follow(tokens(5.0), 5.5)
    assert told.seconds()[1] == {"on_the_way": 0.5, "decode": 0.5, "preempted": 1.5}
    moved = Told()
    moved.admitted(2.5)
    moved.follow(tokens(3.0), 3.0)
    moved.follow(Lost("gone"), 4.0)
    moved.clock.now = 5.0
    moved.log.placed(replace(NOTHING_ASKED))
    moved.log.submitted(0)
    other = SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", 0.25, when=WorkerTime(77.25, 900.0))
    moved.follow(other, 5.5)
    moved.follow(TokensSampled((8,), when=WorkerTime(78.25, 900.0)), 6.5)
    assert moved.seconds()[1] == {"on_the_way": 0.25, "decode": 1.0, "moved": 2.25}


def test_without_the_times_of_a_worker_its_work_ends_when_it_is_read() -> None:
    told = Told((2.5, 3.0))
    told.follow(SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", 0.25), 3.0)
    told.follow(TokensSampled((7,)), 4.0)
    assert told.seconds() == ({"router_still": 0.5, "blocks": 0.5, "prefill": 1.0}, {})


def test_a_router_that_had_stood_still_when_a_request_came_says_so() -> None:
    told = Told((-1.5, 0.0))
    told.admitted(2.5)
    assert told.log.outcome("", "w0", 1).unread_before == 1.5
    assert Told((-1.5, -0.5)).log.outcome("", "w0", 1).unread_before == 0.0


def loads(done: float, blocks: int, load_seconds: float, spared: float, waited: float = 0.0) -> SequenceStarted:
    return SequenceStarted(waited, 0, "", at(done), blocks, load_seconds, spared)


def test_copies_from_host_memory_are_a_phase_of_their_own_and_not_the_prefill() -> None:
    told = Told()
    told.admitted(2.5)
    told.follow(loads(4.0, 47, 0.75, 3.5, waited=0.25), 4.0)
    told.follow(tokens(4.5), 4.5)
    told.follow(end(5.0), 5.0)
    before = {"blocks": 0.5, "prefill_wait": 0.25, "loading": 0.75, "prefill": 1.0}
    assert told.seconds() == (before, {"decode": 0.5})
    outcome = told.log.outcome("", "w0", 1)
    assert (outcome.loaded_blocks, outcome.load_seconds, outcome.spared_seconds) == (47, 0.75, 3.5)


def fetches(done: float, blocks: int, asked: int, took: float, source: str = "disk") -> SequenceAdmitted:
    fetched = Fetched(blocks, asked, took, source)
    return SequenceAdmitted(0, MissReason.NEVER_SEEN, 0, "", done - 2.0, when=at(done), fetched=fetched)


def test_a_wait_for_a_fetch_is_a_phase_of_its_own_and_not_the_wait_for_blocks() -> None:
    told = Told()
    told.follow(fetches(3.0, 35, 47, 0.75), 3.0)
    told.follow(tokens(4.5), 4.5)
    told.follow(end(5.0), 5.0)
    assert told.seconds() == ({"blocks": 0.25, "fetch": 0.75, "prefill": 1.5}, {"decode": 0.5})
    outcome = told.log.outcome("", "w0", 1)
    assert (outcome.fetched_blocks, outcome.fetch_asked, outcome.fetch_seconds) == (35, 47, 0.75)
    assert (outcome.fetch_source, outcome.unfetched_blocks) == ("disk", 12)
    assert outcome_of(Decision("d", DecisionKind.OUTCOME, 0, "", "r", (), texts_of(outcome),
                               figures=figures_of(outcome))) == outcome  # fmt: skip


def test_what_a_preempted_sequence_waits_for_is_taken_off_the_preemption() -> None:
    told = Told()
    told.follow(fetches(3.0, 4, 4, 0.5), 3.0)
    told.follow(tokens(3.5), 3.5)
    told.follow(Preempted(at(4.0)), 4.0)
    told.follow(fetches(5.0, 3, 4, 0.75, "worker-1"), 5.0)
    told.follow(tokens(6.5), 6.5)
    told.follow(end(7.0), 7.0)
    after = {"decode": 1.0, "preempted": 1.75, "fetch": 0.75}
    assert told.seconds() == ({"blocks": 0.5, "fetch": 0.5, "prefill": 0.5}, after)
    outcome = told.log.outcome("", "w0", 1)
    assert (outcome.fetched_blocks, outcome.fetch_asked, outcome.fetch_source) == (7, 8, "worker-1")


def test_two_sequences_that_wait_at_once_wait_once() -> None:
    told = Told(sequences=2)
    told.follow(fetches(3.0, 4, 4, 0.75), 3.0)
    told.follow(fetches(3.0, 4, 4, 0.75), 3.0, index=1)
    assert told.seconds()[0] == {"blocks": 0.25, "fetch": 0.75}


def test_what_a_preempted_sequence_loads_is_taken_off_the_preemption() -> None:
    told = Told()
    told.admitted(2.5)
    told.follow(loads(3.0, 2, 0.0625, 0.25), 3.0)
    told.follow(tokens(3.5), 3.5)
    told.follow(Preempted(at(4.0)), 4.0)
    told.admitted(5.0)
    told.follow(loads(6.0, 3, 0.25, 0.5), 6.0)
    told.follow(tokens(6.5), 6.5)
    told.follow(end(7.0), 7.0)
    before = {"blocks": 0.5, "loading": 0.06, "prefill": 0.94}
    assert told.seconds() == (before, {"decode": 1.0, "loading": 0.25, "preempted": 2.25})
    outcome = told.log.outcome("", "w0", 1)
    assert (outcome.loaded_blocks, outcome.load_seconds, outcome.spared_seconds) == (5, 0.3125, 0.75)
