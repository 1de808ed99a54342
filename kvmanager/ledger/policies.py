"""The replaceable policies of a ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmanager.ledger.block_granter import BlockGranter
from kvmanager.ledger.preemption import PreemptionPolicy
from kvmanager.ledger.rebuild import InventoryLoader
from kvmanager.ledger.report_applier import ReportApplier


@dataclass(frozen=True, slots=True)
class LedgerPolicies:
    """The policies of a ledger. None of them has state of its own, so any number of ledgers may share them."""

    granter: BlockGranter = field(default_factory=BlockGranter)
    reports: ReportApplier = field(default_factory=ReportApplier)
    preemption: PreemptionPolicy = field(default_factory=PreemptionPolicy)
    loader: InventoryLoader = field(default_factory=InventoryLoader)


DEFAULT_POLICIES = LedgerPolicies()
