"""The worker's part in the reuse of parts of blocks: what it reports, what it counts, and what it leaves to compute."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.errors import ProtocolViolation
from common.contracts.hashing import all_partial_hashes, little_endian_int32, root_digest
from common.contracts.lease import Admit, Copy, GrantBatch, Report, Reserve
from common.contracts.types import BlockHash, BlockId, FinishReason, SequenceId
from common.wire.lease_codec import report_to_proto
from gpuworker.scheduling.report_builder import ReportBuilder, SessionState
from quire.api.channel import MAX_MESSAGE_BYTES
from tests.support.gpuworker.agent_harness import Driver, blocks, keys

SIZE = 8
ONE, TWO = SequenceId(0), SequenceId(1)


def parts(tokens: list[int]) -> tuple[Any, ...]:
    root = root_digest("m", "t", SIZE)
    return all_partial_hashes(root, keys(tokens, SIZE), little_endian_int32(tokens), SIZE)


def worker(**options: Any) -> Driver:
    """Return a worker that takes blocks of eight for large."""
    return Driver(16, SIZE, **{"min_partial_block": SIZE, **options})


def submit(made: Driver, number: int, tokens: list[int], max_tokens: int = 9, **more: Any) -> None:
    made.submit(number, tokens, max_tokens=max_tokens, partial_hashes=parts(tokens), **more)


def taken(made: Driver) -> Report:
    report = made.agent.take_report()
    assert report is not None
    return report


def grant_a_copy(made: Driver, number: int, row: list[int], shared: int, slots: int, src: int) -> None:
    """Admit a sequence with a copy of the leading slots of a block, behind its shared blocks."""
    granted = Admit(SequenceId(number), blocks(row), shared, shared * SIZE + slots)
    part = Copy(BlockId(src), BlockId(row[shared]), shared * SIZE + slots)
    made.agent.apply_grant(GrantBatch(made.lease_target, copy=(part,), admit=(granted,)))


FIRST = list(range(20))
SECOND = [*range(14), 60, 61, 62, 63, 64, 65]
"""Six slots of the second block in common: two quarters of two, and the third."""


def one_is_computed() -> Driver:
    made = worker()
    submit(made, 0, FIRST)
    made.admit(0, [0, 1, 2])
    made.step()
    return made


def test_reserves_and_seals_carry_the_partial_hashes() -> None:
    made = one_is_computed()
    report = taken(made)
    known = parts(FIRST)
    assert report.reserve[0].partial_hashes == known
    assert len(known) == 3 + 3 + 2
    assert report.partials == tuple(zip(keys(FIRST, SIZE), (known[:3], known[3:6]), strict=True))


def test_a_block_that_generation_fills_is_sealed_with_its_parts() -> None:
    made = worker()
    submit(made, 0, FIRST[:15])
    made.admit(0, [0, 1])
    taken(made)
    made.lease([5])
    for _ in range(3):
        made.step(token=7)
    text = [*FIRST[:15], 7, 7, 7]
    report = taken(made)
    assert dict(report.partials)[keys(text, SIZE)[1]] == parts(text)[3:6]


def test_a_prompt_below_a_quarter_has_parts_once_generation_fills_its_block() -> None:
    made = worker()
    submit(made, 0, [4])
    made.admit(0, [0])
    for _ in range(8):
        made.step(token=7)
    text = [4, *[7] * 8]
    assert taken(made).partials == ((keys(text, SIZE)[0], parts(text)[:3]),)


def test_what_is_copied_is_not_computed_and_counts_as_cached() -> None:
    made = one_is_computed()
    submit(made, 1, SECOND)
    taken(made)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    plan = made.plan()
    assert [(each.src, each.dst) for each in plan.copies if isinstance(each, Copy)] == [(1, 4)]
    assert [(row.start, row.length) for row in plan.rows if row.sequence == TWO] == [(14, 6)]
    assert made.complete(plan).recounted == {}
    assert made.agent.usage(TWO).cached_tokens == 14
    assert taken(made).copied == (TWO,)


def test_the_block_is_sealed_by_the_hash_of_its_own_tokens() -> None:
    made = one_is_computed()
    submit(made, 1, SECOND)
    taken(made)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    made.step()
    assert taken(made).seal == ((BlockId(4), keys(SECOND, SIZE)[1]),)


def test_a_copy_that_ends_in_the_last_block_leaves_the_last_token() -> None:
    made = one_is_computed()
    submit(made, 1, FIRST[:14])
    taken(made)
    grant_a_copy(made, 1, [0, 4], shared=1, slots=5, src=1)
    plan = made.plan()
    assert [(row.start, row.length, row.samples) for row in plan.rows if row.sequence == TWO] == [(13, 1, True)]
    made.complete(plan)
    assert made.agent.usage(TWO).cached_tokens == 13


def test_a_copy_runs_with_the_next_step_whosever_that_is_and_is_reported_then() -> None:
    """The budget of the step is used up by the first sequence's prompt."""
    made = worker(max_num_batched_tokens=4)
    submit(made, 0, FIRST)
    made.admit(0, [0, 1, 2])
    for _ in range(4):
        made.step()
    submit(made, 1, SECOND, priority=-1)
    taken(made)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    plan = made.plan()
    assert [row.sequence for row in plan.rows] == [ONE]
    assert len(plan.copies) == 1
    early = made.agent.take_report()
    assert early is None or early.copied == ()
    made.complete(plan)
    assert taken(made).copied == (TWO,)


def test_a_sequence_that_is_preempted_before_its_copy_reports_no_copy() -> None:
    """It is admitted again, with another copy, while the step of the first one is in flight."""
    made = worker(max_num_batched_tokens=4)
    submit(made, 0, FIRST)
    made.admit(0, [0, 1, 2])
    for _ in range(4):
        made.step()
    submit(made, 1, SECOND, priority=-1)
    taken(made)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    plan = made.plan()
    made.preempt(1)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    made.complete(plan)
    assert taken(made).copied == ()
    made.step()
    assert taken(made).copied == (TWO,)


def test_a_sequence_that_was_cancelled_before_the_grant_reports_no_copy() -> None:
    made = one_is_computed()
    submit(made, 1, SECOND)
    made.agent.cancel_sequence(TWO)
    taken(made)
    grant_a_copy(made, 1, [0, 4, 5], shared=1, slots=6, src=1)
    made.step()
    report = made.agent.take_report()
    assert report is None or report.copied == ()


def test_a_grant_that_counts_more_as_cached_than_it_shares_and_copies_is_no_failure() -> None:
    """Only what is filled counts. The first admission shares its whole table, and the copy is of the second one."""
    made = one_is_computed()
    submit(made, 1, FIRST[:12])
    submit(made, 2, SECOND)
    taken(made)
    whole = Admit(TWO, blocks([0, 1]), 2, 10_000)
    with pytest.raises(ProtocolViolation, match="all of its tokens"):
        made.agent.apply_grant(GrantBatch(0, admit=(whole,)))
    short = Admit(TWO, blocks([0]), 1, 10_000)
    other = Admit(SequenceId(2), blocks([0, 4, 5]), 1, SIZE)
    made.agent.apply_grant(GrantBatch(0, copy=(Copy(BlockId(1), BlockId(4), SIZE + 6),), admit=(short, other)))
    made.step()
    assert made.agent.usage(TWO).cached_tokens == SIZE
    assert taken(made).copied == ()


def test_small_blocks_have_no_parts() -> None:
    made = worker(min_partial_block=2 * SIZE)
    submit(made, 0, FIRST)
    made.admit(0, [0, 1, 2])
    made.step()
    report = taken(made)
    assert (report.reserve[0].partial_hashes, report.partials) == ((), ())
    assert len(report.seal) == 2


def test_a_sequence_that_is_not_cached_has_no_parts() -> None:
    made = worker()
    submit(made, 0, FIRST, no_cache=True)
    made.admit(0, [0, 1, 2])
    made.step()
    report = taken(made)
    assert (report.reserve[0].partial_hashes, report.partials, report.seal) == ((), (), ())


def test_a_fork_reserves_without_partial_hashes() -> None:
    """It shares its parent's block table, so they would only make the report larger."""
    made = worker()
    submit(made, 0, FIRST)
    submit(made, 1, FIRST, fork_of=ONE)
    report = taken(made)
    assert report.reserve[0].partial_hashes == parts(FIRST)
    assert report.reserve[1].partial_hashes == ()


def test_reserves_that_are_too_large_for_one_message_come_in_several_reports_in_order() -> None:
    """The other columns come with the last reserve: a report that ends a sequence must not overtake its reserve."""
    builder = ReportBuilder()
    builder.state = SessionState.OPEN
    many = tuple(BlockHash(bytes(16)) for _ in range(8192))
    for number in range(200):
        builder.reserve(Reserve(SequenceId(number), 131072, 131073, 0, many[:2048], partial_hashes=many[:6144]))
    builder.finished(SequenceId(199), FinishReason.CANCELLED)
    reports = []
    while (report := builder.take_report(3)) is not None:
        reports.append(report)
    assert [each.sequence for report in reports for each in report.reserve] == list(range(200))
    assert [len(report.finished) for report in reports] == [0] * (len(reports) - 1) + [1]
    assert max(report_to_proto(report).ByteSize() for report in reports) < MAX_MESSAGE_BYTES
    assert len(reports) == 4
    assert not builder.urgent


def test_a_prompt_whose_parts_are_missing_gives_none() -> None:
    made = worker()
    made.submit(0, FIRST)
    made.admit(0, [0, 1, 2])
    made.step()
    report = taken(made)
    assert (report.reserve[0].partial_hashes, report.partials) == ((), ())
