"""Composes one step: decodes come first, chunks of prompts fill the rest of one token budget.

A prompt of higher priority than a decode comes before it: the decode waits where the budget is too small for both.

Readiness is a property of blocks: a sequence computes from its first unfilled slot on, whichever sequence filled the
earlier slots. A shared prefix has no owner, so nothing is lost when one of the sequences that share it ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import itemgetter

from common.contracts.lease import RUNWAY_UNDER_PRESSURE
from common.contracts.types import BlockId, SequenceId
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, ScoredPart
from gpuworker.scheduling.block_states import BlockStates
from gpuworker.scheduling.drafting import (
    MAX_DRAFTS,
    MAX_STEP_DRAFTS,
    DraftModel,
    DraftPrices,
    Outlook,
    outlooks_worth_it,
)
from gpuworker.scheduling.sequence import Sequence


@dataclass(slots=True)
class Composition:
    """The effect of one step on the running sequences.

    `bound` are blocks that sequences took from the pool; `stalled` found none; `deferred` counts those that found no
    budget and keep their order. `scorable` is how many more positions may score a prompt. `drafts` counts those of all
    rows, and a draft model took `guessing` seconds for them. `recounted` has the cached tokens of prompts that the step
    ends, where the grants said other numbers. Prompts that lack blocks leave some to decodes, for `kept_slots` slots.
    Where the pool has groups, `bound_groups` has the group of each bound block, and `bound_pages` the further pages of
    all of them. `loads` and `saves` are checkpoints of states that rows begin with, and that they leave.
    """

    scorable: int
    rows: list[ScheduledRow] = field(default_factory=list)
    scored: list[ScoredPart] = field(default_factory=list)
    bound: list[tuple[SequenceId, BlockId]] = field(default_factory=list)
    bound_groups: list[int] = field(default_factory=list)
    bound_pages: list[BlockId] = field(default_factory=list)
    loads: list[Checkpoint] = field(default_factory=list)
    saves: list[Checkpoint] = field(default_factory=list)
    stalled: list[SequenceId] = field(default_factory=list)
    deferred: int = 0
    drafts: int = 0
    guessing: float = 0.0
    recounted: dict[SequenceId, int] = field(default_factory=dict)
    kept_slots: int = 0


def _room_to_score(sequence: Sequence, scorable: int) -> int:
    """Return how many positions a row may have, of which at most `scorable` score the prompt."""
    start = sequence.num_computed_tokens
    reach = max(start, sequence.score_from) + scorable
    return len(sequence.tokens) - start if reach >= sequence.score_until else reach - start


def _score(sequence: Sequence, start: int, step: Composition) -> None:
    """Add the scored part of the row that comes next, which begins at `start`."""
    first, end = max(start, sequence.score_from), min(sequence.num_computed_tokens, sequence.score_until)
    if first < end:
        step.scorable -= end - first
        step.scored.append(ScoredPart(len(step.rows), first, end))


def _room(sequence: Sequence) -> int:
    """Return how many drafts fit before the sequence's limit: a step samples one token more."""
    return max(0, sequence.limit - len(sequence.tokens) - 1)


def _missing_pages(sequence: Sequence, places: int) -> int:
    """Return how many pages a sequence lacks for so many places in every group."""
    lacking = [table.size * max(0, places - len(table)) for table in sequence.tables if not table.checkpoints]
    return sum(lacking)


def _seniority(sequence: Sequence) -> tuple[int, int]:
    return sequence.seniority


class StepScheduler:
    """The running sequences in seniority order: higher priority first, then earlier arrival."""

    def __init__(
        self,
        blocks: BlockStates,
        block_size: int,
        budget: int,
        long_prefill_cap: int,
        max_scored_tokens: int = 256,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_scored_tokens = max_scored_tokens
        self.block_size = block_size
        self.shift = block_size.bit_length() - 1
        self.budget = budget
        self.long_prefill_cap = long_prefill_cap
        self.draft_model = draft_model
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def add_sequence(self, sequence: Sequence) -> None:
        insort(self.prefilling, sequence, key=_seniority)

    def remove(self, sequence: Sequence) -> None:
        (self.prefilling if sequence in self.prefilling else self.decoding).remove(sequence)

    def compose(self, prices: DraftPrices | None = None, kept_slots: int = 0) -> Composition:
        """Compose the next step from every running sequence that can sample its next token or come nearer to it.

        With `prices`, no other step is in flight, and sequences may draft. A prompt that lacks blocks leaves a part of
        those in the pool that decodes will bind within `kept_slots` slots.
        """
        step = Composition(self.max_scored_tokens, kept_slots=kept_slots)
        urgent = self._urgent_prompts(kept_slots)
        left = self._compose_decodes(step, self.budget, urgent)
        if prices is not None:
            spare = max(0, left - urgent[-1][1]) if urgent else left
            left += self._compose_drafts(step, spare, prices) - spare
        self._compose_prefills(step, left)
        return step

    def wants_to_draft(self, prices: DraftPrices) -> bool:
        """Whether a step with drafts, which needs all tokens before it, is better than one that is planned now."""
        drafting = [each for each in self.decoding if each.drafter is not None and _room(each) > 1]
        outlooks = [each.outlook(each.sampling) for each in drafting]
        likely = any(each.chance for each in outlooks)
        return likely and any(outlooks_worth_it(outlooks, len(self.decoding), prices))

    def _compose_drafts(self, step: Composition, left: int, prices: DraftPrices) -> int:
        """Add drafts to rows of decodes, from the budget and the blocks that the rows leave."""
        places = {row.sequence: place for place, row in enumerate(step.rows)}
        drafting = [each for each in self.decoding if each.drafter is not None and each.id in places]
        outlooks = [each.outlook(0) for each in drafting]
        counts = outlooks_worth_it(outlooks, len(step.rows), prices, min(left, MAX_STEP_DRAFTS))
        self._guess(drafting, outlooks, counts, step)
        for sequence, count in zip(drafting, counts, strict=True):
            drafts = self._draft(sequence, count, step) if count else ()
            if drafts:
                place = places[sequence.id]
                step.drafts += len(drafts)
                row = step.rows[place]._replace(blocks=sequence.blocks(), drafts=drafts)
                step.rows[place] = row._replace(tables=sequence.page_tables()) if sequence.tables else row
        return left - step.drafts

    def _guess(self, drafting: list[Sequence], outlooks: list[Outlook], counts: list[int], step: Composition) -> None:
        """Let the draft model guess, for all sequences at once, where their drafts are not known already."""
        wanted = [
            (sequence.drafter, min(count, _room(sequence)))
            for sequence, outlook, count in zip(drafting, outlooks, counts, strict=True)
            if count and _room(sequence) and outlook.behind is not None and sequence.drafter is not None
        ]
        if wanted and self.draft_model is not None:
            step.guessing = self.draft_model.guess(wanted)

    def _draft(self, sequence: Sequence, count: int, step: Composition) -> tuple[int, ...]:
        """Return the drafts for which there are blocks; what prefills may bind in this step stays for them.

        Their slots do not count as filled until the drafts are accepted.
        """
        drafts = sequence.propose(min(count, MAX_DRAFTS, _room(sequence)))
        start, size = sequence.num_computed_tokens, self.block_size
        while start + len(drafts) > len(sequence.block_table) * size and len(self.blocks.pool) > len(self.prefilling):
            if not self._bind(sequence, step, stalls=False):
                break
        return drafts[: len(sequence.block_table) * size - start]

    def _compose_decodes(self, step: Composition, left: int, urgent: list[tuple[int, int]]) -> int:
        fill, shift, rows, paged = self.blocks.fill, self.shift, step.rows, self.blocks.made is not None
        for sequence in self.decoding:
            if len(sequence.tokens) + sequence.sampling >= sequence.limit:
                continue  # its last token is being sampled
            if not left or (urgent and left <= self._kept_for(urgent, sequence)):
                step.deferred += 1
                continue
            start = sequence.num_computed_tokens
            index = start >> shift
            if index == len(sequence.block_table) and not self._bind(sequence, step):
                continue
            fill[sequence.block_table[index]] += 1
            sequence.num_computed_tokens = start + 1
            sequence.sampling += 1
            sequence.in_flight += 1
            blocks = sequence.snapshot or sequence.blocks()
            if paged:
                self._fill_runs(sequence, index, 1)
                if sequence.tail is not None:
                    self._note_tail(sequence, step)
                rows.append(ScheduledRow(sequence.id, start, 1, blocks, True, (), sequence.page_tables()))
            else:
                rows.append(ScheduledRow(sequence.id, start, 1, blocks, True))
            left -= 1
        return left

    def _urgent_prompts(self, kept_slots: int) -> list[tuple[int, int]]:
        """Return the prompts of higher priority than some decode, the highest first.

        Each comes with minus its priority, and the tokens that it and those before it want of a step.
        """
        if not self.prefilling or not self.decoding:
            return []
        lowest = self.decoding[-1].seniority[0]
        found, tokens = [], 0
        for sequence in self.prefilling:
            if sequence.seniority[0] >= lowest:
                break
            self.advance(sequence)
            wanted = self._wanted(sequence, kept_slots)
            if wanted > 0:
                tokens += wanted
                found.append((sequence.seniority[0], tokens))
        return found

    def _wanted(self, sequence: Sequence, kept_slots: int) -> int:
        """Return how many tokens of a prompt a step could compute: for the others there are no blocks, or no scores."""
        known, there = len(sequence.tokens), sequence.covered
        if there << self.shift < known:
            kept = self._kept_for_others(sequence, kept_slots) if there == len(sequence.block_table) else 0
            there += max(0, len(self.blocks.pool) - kept) // self._lacks_at(sequence, there)
        wanted = min(known, there << self.shift) - sequence.num_computed_tokens
        if sequence.score_until:
            wanted = min(wanted, _room_to_score(sequence, self.max_scored_tokens))
        return min(wanted, self.long_prefill_cap or wanted)

    @staticmethod
    def _kept_for(urgent: list[tuple[int, int]], decode: Sequence) -> int:
        """Return the tokens of the budget that prompts of higher priority than a decode want."""
        place = bisect_left(urgent, decode.seniority[0], key=itemgetter(0))
        return urgent[place - 1][1] if place else 0

    def _compose_prefills(self, step: Composition, left: int) -> None:
        cap = self.long_prefill_cap if self.running > 1 else 0
        done = []
        for sequence in self.prefilling:
            self.advance(sequence)
            start = sequence.num_computed_tokens
            room = min(left, cap) if cap else left
            if sequence.score_until:
                room = min(room, _room_to_score(sequence, step.scorable))
            if not room:
                step.deferred += 1
                continue
            length = self._take(sequence, room, step)
            if not length:
                continue
            left -= length
            sequence.count_row(start, start + length)
            whole = sequence.num_computed_tokens == len(sequence.tokens)
            samples = whole and len(sequence.tokens) < sequence.limit
            sequence.in_flight += 1
            if sequence.score_until:
                _score(sequence, start, step)
            step.rows.append(
                ScheduledRow(sequence.id, start, length, sequence.blocks(), samples, (), sequence.page_tables())
            )
            sequence.sampling += samples
            if whole:
                done.append(sequence)
        for sequence in done:
            hits = sequence.settle_hits()
            if hits is not None:
                step.recounted[sequence.id] = hits
            self.prefilling.remove(sequence)
            insort(self.decoding, sequence, key=_seniority)

    def advance(self, sequence: Sequence) -> None:
        """Move past positions that any row has filled; the sequence computes its last token itself."""
        last, size, fill = len(sequence.tokens) - 1, self.block_size, self.blocks.fill
        block_table = sequence.block_table
        while sequence.num_computed_tokens < last:
            index = sequence.num_computed_tokens >> self.shift
            filled = index * size + fill[block_table[index]] if index < len(block_table) else 0
            if filled <= sequence.num_computed_tokens:
                return
            sequence.skip(min(filled, last), size)

    def _take(self, sequence: Sequence, room: int, step: Composition) -> int:
        """Write up to `room` unfilled positions in a row from `num_computed_tokens` on; return how many.

        A prompt that was granted in part may find no block, and leaves some to others behind its own table. It is
        stalled only if no step of it is to be run or in flight: where layers have windows, such a step lets blocks go
        that left them.
        """
        start, end = sequence.num_computed_tokens, min(sequence.num_computed_tokens + room, len(sequence.tokens))
        if sequence.checkpoints is not None:
            end = min(end, self._next_checkpoint(sequence, start, end))
        fill, row, size, alone = self.blocks.fill, sequence.block_table, self.block_size, not sequence.in_flight
        kept = self._kept_for_others(sequence, step.kept_slots) if len(row) * size < end else 0
        covered = sequence.covered if sequence.tables else len(row)
        while sequence.num_computed_tokens < end:
            index, offset = sequence.num_computed_tokens >> self.shift, sequence.num_computed_tokens & (size - 1)
            stalls = alone and sequence.num_computed_tokens == start
            if index == covered:
                if not self._bind(sequence, step, stalls, kept if index == len(row) else 0):
                    break
                covered += 1
            if fill[row[index]] > offset:
                break  # another row filled it: a slot is written once; the next step continues after it
            length = min(size - offset, end - sequence.num_computed_tokens)
            fill[row[index]] += length
            if sequence.tables:
                self._fill_runs(sequence, index, length)
            sequence.num_computed_tokens += length
        if sequence.checkpoints is not None and sequence.num_computed_tokens > start:
            self._note_states(sequence, step)
        return sequence.num_computed_tokens - start

    def _next_checkpoint(self, sequence: Sequence, start: int, end: int) -> int:
        """Return where a row from `start` on ends so that it leaves the next checkpoint; `end` where it leaves none."""
        assert sequence.checkpoints is not None
        place = sequence.checkpoints.next_checkpoint(start >> self.shift)
        return end if place is None else (place + 1) << self.shift

    def _note_states(self, sequence: Sequence, step: Composition) -> None:
        """Note the checkpoint that a planned row begins with, and the one that it leaves."""
        table, size = sequence.checkpoints, self.block_size
        assert table is not None
        if sequence.loads is not None:
            step.loads.append(Checkpoint(sequence.id, sequence.loads))
            sequence.loads = None
        place, rest = divmod(sequence.num_computed_tokens, size)
        if not rest and table.next_checkpoint(place - 1) == place - 1:
            assert self.blocks.made is not None
            step.saves.append(Checkpoint(sequence.id, self.blocks.made.pages[table.block(place - 1)]))
        elif sequence.tail is not None:
            self._note_tail(sequence, step)

    def _note_tail(self, sequence: Sequence, step: Composition) -> None:
        """Let a planned row leave its states in the tail, if it ends a block behind all of the prompt's checkpoints."""
        tail, (place, rest) = sequence.tail, divmod(sequence.num_computed_tokens, self.block_size)
        if tail is not None and not rest and place > tail.place:
            tail.move(place - 1)
            step.saves.append(Checkpoint(sequence.id, tail.pages))

    def _kept_for_others(self, sequence: Sequence, slots: int) -> int:
        """Return how many blocks of the pool a prompt that was granted in part leaves to others.

        To decodes it leaves a part of those that they bind so soon. Where the pool has groups, it leaves a place to
        each prompt whose windows go on, because that has the first group's blocks there.
        """
        if not slots:
            return 0
        kept = -(-self._wanted_by_decodes(slots) // RUNWAY_UNDER_PRESSURE)
        if sequence.tables:
            behind = [(each, each.covered) for each in self.prefilling if each is not sequence]
            kept += sum([self._lacks_at(each, at) for each, at in behind if at < len(each.block_table)])
        return kept

    def _fill_runs(self, sequence: Sequence, index: int, slots: int) -> None:
        """Count slots of a place as filled in every group behind the first: the blocks of a place fill together."""
        for table in sequence.tables[1:]:
            if not table.checkpoints:
                self.blocks.fill[table.block(index)] += slots

    def _lacks_at(self, sequence: Sequence, index: int) -> int:
        """Return how many blocks, or pages, a sequence binds at a place that is not covered."""
        if not sequence.tables:
            return 1
        return sum([table.size for table in sequence.tables if len(table) <= index and not table.checkpoints])

    def _bind_place(self, sequence: Sequence, step: Composition, kept: int) -> bool:
        """Take a block from the pool for each table that lacks one at the first place that is not covered, or none.

        So many pages stay in the pool.
        """
        index = sequence.covered
        if len(self.blocks.pool) - kept < self._lacks_at(sequence, index):
            return False
        for group, table in enumerate(sequence.tables):
            if len(table) <= index and not table.checkpoints:
                pages = self.blocks.bind_pages(group)
                sequence.append_pages(group, pages)
                step.bound.append((sequence.id, pages[0]))
                step.bound_groups.append(group)
                step.bound_pages += pages[1:]
        return True

    def _bind(self, sequence: Sequence, step: Composition, stalls: bool = True, kept: int = 0) -> bool:
        if sequence.tables:
            bound = self._bind_place(sequence, step, kept)
            if stalls and not bound:
                step.stalled.append(sequence.id)
            return bound
        block = self.blocks.bind() if len(self.blocks.pool) > kept else None
        if block is None:
            if stalls:
                step.stalled.append(sequence.id)
            return False
        sequence.append_block(block)
        step.bound.append((sequence.id, block))
        return True

    def lease_want(self, runway_slots: int) -> int:
        """Return how many blocks the running sequences will bind within their next `runway_slots` slots.

        A prompt counts from its last token on: its own blocks came with the admission. If they did not, those of its
        next chunk count. The token that reaches a sequence's limit is never computed, so its slot is never needed. A
        sequence that drafts needs slots for drafts. Where the pool has groups, the number is that of pages.
        """
        want, shift, round_up = self._wanted_by_decodes(runway_slots), self.shift, self.block_size - 1
        budget = self.budget
        for sequence in self.prefilling:
            known = len(sequence.tokens)
            slots = max(known, min(known - 1 + runway_slots, sequence.limit - 1))
            if sequence.covered << shift < known:
                chunk = min(budget, known - sequence.num_computed_tokens)
                budget -= chunk
                slots = min(slots, sequence.num_computed_tokens + chunk)
            if sequence.tables:
                want += _missing_pages(sequence, (slots + round_up) >> shift)
            else:
                want += max(0, ((slots + round_up) >> shift) - len(sequence.block_table))
        return want

    def _wanted_by_decodes(self, runway_slots: int) -> int:
        """Return how many blocks the decodes will bind within so many slots."""
        want, shift, round_up, paged = 0, self.shift, self.block_size - 1, self.blocks.made is not None
        for sequence in self.decoding:
            ahead = runway_slots if sequence.drafter is None else runway_slots + MAX_DRAFTS
            slots, most = sequence.num_computed_tokens + ahead, sequence.limit - 1
            if slots > most:  # comparisons: this runs for all sequences at each report
                slots = most
            missing = ((slots + round_up) >> shift) - len(sequence.block_table)
            if missing > 0:
                want += _missing_pages(sequence, (slots + round_up) >> shift) if paged else missing
        return want
