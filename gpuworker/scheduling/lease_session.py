"""The session with a KV manager: session numbers, epochs, and what was reported in the current session.

The worker is the fence for its blocks. It chooses the session number, so messages of an earlier session are void in
either direction. It refuses a manager whose epoch is below the highest one that it has accepted, so two managers do no
harm.
"""

from __future__ import annotations

from dataclasses import replace

from common.contracts.lease import Attach, AttachOk, GrantBatch, Inventory, Report, highest_plausible_epoch
from gpuworker.scheduling.lease_agent import LeaseAgent
from gpuworker.scheduling.outcomes import Applied


class LeaseSession:
    """The successive sessions of one incarnation. `attach` is the template of every Attach message."""

    def __init__(self, agent: LeaseAgent, attach: Attach) -> None:
        self.agent = agent
        self.session = attach.session
        self.epoch_seen = attach.epoch_seen
        self.open = False
        self.attach = attach

    def advertise(self, address: str) -> None:
        """Use another address from the next session on: this machine may have got a new one."""
        self.attach = replace(self.attach, address=address)

    def connect(self) -> tuple[Attach, Inventory]:
        """Start a new session, regardless of the last one; return its first two messages. Call between two steps."""
        self.session += 1
        self.open = False
        inventory = self.agent.inventory()
        agent, attach = self.agent, replace(self.attach, session=self.session, epoch_seen=self.epoch_seen)
        attach = replace(attach, reset=agent.reset, disk_frames=agent.disk_frames)
        return attach, inventory

    def accept(self, session: int, ok: AttachOk) -> bool:
        """Open the session that a manager accepted; False when the answer is void or the manager outdated."""
        if not self.is_current(session):
            return False
        if not self.accepts_epoch(ok.epoch):
            self.note_loss(session)
            return False
        self.epoch_seen = max(self.epoch_seen, ok.epoch)
        self.open = True
        self.agent.attached(ok.lease_target)
        return True

    def receive(self, session: int, batch: GrantBatch) -> Applied | None:
        """Apply a batch of the current session; None for any other, also one that was buffered before a break."""
        if not self.open or not self.is_current(session):
            return None
        return self.agent.apply_grant(batch)

    def note_loss(self, session: int) -> None:
        """Handle the loss of a session; nothing when it is not the current one."""
        if self.is_current(session):
            self.open = False
            self.agent.detach()

    def leave_session(self) -> None:
        """Give up the current session from this side: a reply in flight for it is ignored."""
        self.session += 1
        self.open = False
        self.agent.detach()

    def take_report(self) -> tuple[int, Report] | None:
        """Return the session and its next report; None when there is nothing to report or no session."""
        report = self.agent.take_report() if self.open else None
        return None if report is None else (self.session, report)

    def is_current(self, session: int) -> bool:
        """Whether a message belongs to the current session."""
        return session == self.session

    def accepts_epoch(self, epoch: int) -> bool:
        """Whether a manager is at least as new as the newest one accepted so far, and its epoch is believable."""
        return self.epoch_seen <= epoch <= highest_plausible_epoch(self.epoch_seen)
