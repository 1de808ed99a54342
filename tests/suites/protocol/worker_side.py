"""The worker's side of a world: what its engine does around the real LeaseAgent, and the device on which steps run."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

from common.contracts.hashing import MIN_PARTIAL_BLOCK, block_hash_of, key_of
from common.contracts.lease import Admit, Attach, AttachOk, CachedBlock, Copy, GrantBatch, Inventory
from common.contracts.types import TRIMMED, BlockId, FinishReason, KvGeometry, PoolIdentity, SequenceId
from gpuworker.scheduling.batch_plan import Checkpoint, ScheduledRow, StepPlan, StepResult
from gpuworker.scheduling.drafting import NO_PRICES, Speculation, verified
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.lease_session import LeaseSession
from gpuworker.scheduling.outcomes import AgentConfig, Completion
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from tests.suites.protocol import content
from tests.suites.protocol.content import Device
from tests.suites.protocol.invariants import Violation
from tests.suites.protocol.scenario import EOS, Guesser, Layers
from tests.suites.protocol.state import WORKER, Link
from tests.suites.protocol.transfer_side import Disk, TransferSide


class WorkerSide(TransferSide):
    """Events of the worker process."""

    def start_worker(self) -> None:
        """Start a worker process with an empty device: a new incarnation."""
        sizes = self.scenario
        self.incarnation += 1
        config = AgentConfig(
            sizes.num_blocks,
            sizes.block_size,
            sizes.budget,
            long_prefill_cap=sizes.long_prefill_cap,
            window=sizes.window,
            runway_slots=sizes.runway_slots,
            max_num_seqs=sizes.max_num_seqs,
            new_drafter=Guesser if any(each.drafts for each in sizes.requests) else None,
            draft_prices=NO_PRICES,
            groups=sizes.groups,
            min_partial_block=sizes.block_size if sizes.partly else MIN_PARTIAL_BLOCK,
            host_frames=sizes.frames,
            disk_frames=sizes.disk,
            serves_peers=sizes.peers > 0,
        )
        geometry = KvGeometry(1, 1, 1, 1, "float32", sizes.window, groups=sizes.groups)
        identity = PoolIdentity("model", "tokenizer", sizes.block_size, geometry)
        incarnation = self.incarnation.to_bytes(16, "big")
        attach = Attach(
            WORKER,
            incarnation,
            0,
            0,
            identity,
            sizes.num_blocks,
            max_num_seqs=sizes.max_num_seqs,
            host_frames=sizes.frames,
            disk_frames=sizes.disk,
        )
        self.worker = LeaseSession(LeaseAgent(config), attach)
        self.restart_transfers()
        self.device = Device(sizes.num_blocks, sizes.block_size, sizes.frames)
        # What a reset dropped may come back from a disk that has missed it.
        self.dropped, self.void = frozenset(), self.void if sizes.disk else frozenset()
        self.states: dict[SequenceId, int] = {}
        self.paths: dict[SequenceId, list[int]] = {}
        self.request_of: dict[SequenceId, int] = {}
        self.flights: tuple[tuple[StepPlan, StepResult], ...] = ()
        self.next_sequence = 0
        self.copying: dict[SequenceId, tuple[Copy, int]] = {}

    def submit(self, _: int) -> bool:
        """The next request comes to the worker, with the tokens that an earlier incarnation delivered."""
        number, *rest = self.unsubmitted
        self.unsubmitted = tuple(rest)
        request = self.scenario.requests[number]
        sequence = self.new_sequence_id()
        tokens = (*request.prompt, *self.delivered[number])
        nodes = content.path(tokens)
        size = self.scenario.block_size
        digests = [content.link(nodes[end - 1], size) for end in range(size, len(tokens) + 1, size)]
        fork_of = next((s for s, r in self.request_of.items() if r == request.fork_of), None)
        new = NewSequence(
            sequence,
            f"r{number}",
            tokens,
            tuple(map(block_hash_of, digests)),
            digests[-1] if digests else content.ROOT_LINK,
            len(request.prompt) + request.max_tokens,
            StopRule(request.max_tokens - len(self.delivered[number]), eos_ids=frozenset({EOS})),
            priority=request.priority,
            fork_of=None if self.delivered[number] else fork_of,
            no_cache=request.no_cache,
            tenant=request.tenant,
            partial_hashes=content.partial_keys(tokens, size) if self.scenario.partly else (),
            retention=request.retention,
            speculation=Speculation() if request.drafts else None,
        )
        self.paths[sequence], self.request_of[sequence] = nodes, number
        self.agent.submit_sequence(new)
        return True

    def new_sequence_id(self) -> SequenceId:
        """Ids rise and are never reused within an incarnation."""
        self.next_sequence += 1
        return SequenceId(self.next_sequence - 1)

    def plan(self, _: int) -> bool:
        """Plan a step and run it: the device works in the order of the plans, so its content may be settled now."""
        plan = self.agent.plan()
        if plan is None:
            return False
        self._write(plan)
        drawn = {row.sequence: self._draw(row) for row in plan.rows if row.samples}
        self.flights = (*self.flights, (plan, StepResult(plan.step, drawn)))
        return True

    def _write(self, plan: StepPlan) -> None:
        """Make every row's writes, then every row's reads; compare each read slot by slot, in every page.

        Checkpoints of states are loaded before the rows, and saved behind them.
        """
        self._load_states(plan.loads)
        for row in plan.rows:
            nodes = self._with_drafts(row)
            for position in range(row.start, row.start + row.length + len(row.drafts)):
                for layers, table in self._tables_of_kv(row):
                    self._write_slot(layers, table, position, nodes[position])
        for row in plan.rows:
            nodes, end = self._with_drafts(row), row.start + row.length + len(row.drafts)
            if row.samples != (end == len(nodes)):
                raise Violation("I3", f"sequence {row.sequence} samples at {end} of {len(nodes)} tokens")
            for layers, table in self._tables_of_kv(row):
                for position in range(layers.first_read(row.start), end):
                    self._read_slot(row, layers, table, position, nodes[position])
            if self.keeps_states:
                self._go_on(row, nodes)
        self._save_states(plan.saves)

    def _tables_of_kv(self, row: ScheduledRow) -> Iterator[tuple[Layers, Items[BlockId]]]:
        """Yield the layers that attend, and the tables of pages that a row has for them."""
        for layers, table in zip(self.layers, row.tables or (row.blocks,), strict=True):
            if not layers.keeps_states:
                yield layers, table

    def _go_on(self, row: ScheduledRow, nodes: list[int]) -> None:
        """I28: a row goes on from the states behind exactly the tokens before it."""
        before = nodes[row.start - 1] if row.start else content.NOTHING
        if row.start and self.states.get(row.sequence) != before:
            raise Violation("I28", f"sequence {row.sequence} goes on at {row.start}: not from the states of its tokens")
        self.states[row.sequence] = nodes[row.start + row.length - 1]

    def _load_states(self, checkpoints: Items[Checkpoint]) -> None:
        first, pages = self.layers[-1].first_part, self.layers[-1].pages
        for each in checkpoints:
            found = {self.device.state_in(page, part) for part, page in enumerate(each.pages, first)}
            node = found.pop()
            if found or node is None or TRIMMED in each.pages or len(each.pages) != pages:
                raise Violation("I28", f"sequence {each.sequence} loads states from pages that hold none")
            self.states[each.sequence] = node

    def _save_states(self, checkpoints: Items[Checkpoint]) -> None:
        """Write states of sequences into pages, of which the worker says nothing yet."""
        blocks = self.agent._blocks
        for each in checkpoints:
            for part, page in enumerate(each.pages, self.layers[-1].first_part):
                if page == TRIMMED or blocks.made is None or blocks.made.block_of(page) in blocks.content:
                    raise Violation("I4", f"a step saves states into page {page} of a sealed block, or of none")
                held = content.as_part(self.states[each.sequence], part)
                self.device.slots[page] = [held] * self.scenario.block_size
                self.dropped -= {page}

    def _write_slot(self, layers: Layers, table: Items[BlockId], position: int, node: int) -> None:
        place, offset = divmod(position, self.scenario.block_size)
        for part, page in layers.parts_at(table, place):
            block = page if self.agent._blocks.made is None else self.agent._blocks.made.block_of(page)
            if page == TRIMMED or block in self.agent._blocks.content:
                raise Violation("I4", f"a step writes page {page} of sealed block {block}, or of none")
            self.device.slots[page][offset] = content.as_part(node, part)
            self.dropped -= {page}
        if self.void and offset == self.scenario.block_size - 1:
            computed = content.key(node, self.scenario.block_size)
            self.void -= {key_of(computed, group) for group in range(len(self.layers))}

    def _read_slot(self, row: ScheduledRow, layers: Layers, table: Items[BlockId], position: int, node: int) -> None:
        place, offset = divmod(position, self.scenario.block_size)
        for part, page in layers.parts_at(table, place):
            if page == TRIMMED or self.device.slots[page][offset] != content.as_part(node, part):
                text = f"sequence {row.sequence} reads slot {offset} of page {page} at {position}"
                raise Violation("I3", text + ": not the K/V of its own tokens")

    def _with_drafts(self, row: ScheduledRow) -> list[int]:
        """Return the nodes of a sequence's tokens, and of its drafts in this step."""
        nodes = self.paths[row.sequence]
        for draft in row.drafts:
            nodes = [*nodes, content.child(nodes[-1], draft)]
        return nodes

    def _draw(self, row: ScheduledRow) -> tuple[int, ...]:
        """Draw behind the last token and behind every draft; the draws that count become the sequence's tokens."""
        nodes = self.paths[row.sequence]
        request = self.scenario.requests[self.request_of[row.sequence]]
        behind = self._with_drafts(row)[len(nodes) - 1 :]
        output = len(nodes) - len(request.prompt) + 1
        samples = [request.draw(node, output + place) for place, node in enumerate(behind)]
        counting = samples[: verified(row.drafts, samples)]
        if self.keeps_states:  # before the next step it follows the drafts that were right
            self.states[row.sequence] = behind[len(counting) - 1]
        for token in counting:
            nodes.append(content.child(nodes[-1], token))
        return tuple(counting)

    def complete(self, _: int) -> bool:
        """Deliver the results of the oldest step."""
        (plan, result), *rest = self.flights
        self.flights = tuple(rest)
        ran = set(map(id, plan.copies))
        self.copying = {each: of for each, of in self.copying.items() if id(of[0]) not in ran}
        self._settle(self.agent.complete(result))
        return True

    def _settle(self, completion: Completion) -> None:
        for sequence in completion.forgotten:
            self.states.pop(sequence, None)
        for sequence, tokens in completion.tokens.items():
            self.delivered[self.request_of[sequence]].extend(tokens)
        for end in completion.finished:
            number = self.request_of.pop(end.sequence)
            self.ended[number] = end.reason
            outputs, got = self.scenario.requests[number].outputs, tuple(self.delivered[number])
            whole = end.reason in (FinishReason.STOP, FinishReason.LENGTH)
            if got != (outputs if whole else outputs[: len(got)]):
                raise Violation("delivery", f"request {number} delivered {got} of {outputs}")

    def report(self, _: int) -> bool:
        """The worker says what is new. Step numbers and times are left out: they name things and decide nothing."""
        taken = self.worker.take_report()
        if taken is None or self.link is None:
            return False
        report = replace(taken[1], step=0, computed=())
        self._check_groups(report.bind_groups, report.bind_pages, report.trim_groups)
        self.link.to_manager = (*self.link.to_manager, report)
        return True

    def _check_groups(self, *told: Items[object]) -> None:
        """I33: where the pool has no groups, what messages tell of groups is empty."""
        if any(told) and not self.scenario.groups:
            raise Violation("I33", "a message tells of groups, which the pool has not")

    def _copy(self, batch: GrantBatch) -> None:
        """Make the copies of a batch; the next plan carries them, and nothing stands between on the stream."""
        for each in batch.tier:
            frame = self.device.frame(each.frame)
            if each.load:
                self.device.copy_block(frame, each.block)
                self.dropped -= {each.block}
            else:
                self.device.copy_block(each.block, frame)
        for copy in batch.copy:
            self.device.copy_block(copy.src, copy.dst)
            self.dropped -= {copy.dst}

    def connect(self, manager: int) -> bool:
        """The worker opens a stream to a manager, which sees by that, at the latest, that the old one is gone."""
        attach, inventory = self.worker.connect()
        inventory = replace(inventory, frames=_undated(inventory.frames), saved=_undated(inventory.saved))
        told = *inventory.block_groups, *inventory.block_pages, *inventory.frame_groups, *inventory.frame_pages
        self._check_groups(told, *(each.runs for each in inventory.sequences))
        opened = (attach, _without_times(inventory))
        self.links = [*self._worth_keeping(), Link(attach.session, manager, to_manager=(opened,))]
        return True

    def _worth_keeping(self) -> list[Link]:
        """Keep only the last broken link that still has messages: older ones add nothing but states."""
        return [link for link in self.links if link.to_manager or link.to_worker][-1:]

    def to_worker(self, number: int) -> bool:
        """A message reaches the worker, which takes it at the cut-off of its next step."""
        link = self.links[number]
        message, link.to_worker = link.to_worker[0], link.to_worker[1:]
        if isinstance(message, AttachOk):
            if not self.worker.accept(link.session, message) and self.worker.is_current(link.session):
                link.up = False
            return True
        for admit in message.admit:
            self._check_groups(admit.runs, admit.pages)
        applied = self.worker.receive(link.session, message)
        if applied is not None:
            if message.reset:
                self.disk = Disk(reset=message.reset)
            self._copy(message)
            for admit in applied.admitted:
                self.copying.pop(admit.sequence, None)
                if admit.cached_tokens > admit.n_shared * self.scenario.block_size:
                    target = admit.block_table[admit.n_shared]
                    copy = next(each for each in message.copy if each.dst == target)
                    self.copying[admit.sequence] = (copy, link.session)
                num_tokens = self.agent.tokens_of(admit.sequence)
                if len(num_tokens) != len(self.paths[admit.sequence]):
                    raise Violation("delivery", f"sequence {admit.sequence} lost a token that was drawn")
                self._note_use(admit)
            self._settle(self.agent.departures())
        return True

    def _note_use(self, admit: Admit) -> None:
        """A reset leaves what a sequence uses that was admitted before it came by a manager that knows of none."""
        if self.agent.reset == self.resets:
            return
        used = {block for table in (admit.block_table, *admit.runs) for block in table[: admit.n_shared]}
        self.dropped -= {page for block in used if block != TRIMMED for page in self.pages_of(block)}
        known = self.agent._sequences[admit.sequence].block_hashes[: admit.n_shared]
        self.void -= {key_of(each, group) for each in known for group in range(len(self.layers))}


def _without_times(inventory: Inventory) -> Inventory:
    return replace(inventory, cached_blocks=_undated(inventory.cached_blocks))


def _undated(claims: Items[CachedBlock]) -> tuple[CachedBlock, ...]:
    return tuple([replace(each, last_used=0) for each in claims])
