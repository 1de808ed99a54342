"""What each tenant holds of a worker, over its share.

A tenant's part of a worker is the greater of its part of the places and its part of the blocks. This is dominant
resource fairness (Ghodsi et al. 2011). Its share is its weight over the weights of all tenants that have a sequence
there. The load of a tenant is its part over its share: 1 is exactly the share.
"""

from __future__ import annotations

from kvmanager.contracts.ledger_config import LedgerConfig
from kvmanager.contracts.sequence import Sequence
from kvmanager.ledger.sequence_table import TenantUse


class TenantShares:
    """The loads of all tenants at one moment.

    A block counts for the sequence that it was granted to first; those that share it hold it for nothing.
    """

    __slots__ = ("_places", "_pool_blocks", "_uses", "_weights")

    def __init__(self, config: LedgerConfig, tenants: dict[str, TenantUse]) -> None:
        self._places, self._pool_blocks = max(1, config.max_num_seqs), max(1, config.num_blocks)
        self._uses = tenants.copy()
        self._weights = sum(use.weight for use in self._uses.values())

    def count_running(self, tenant: str) -> int:
        """Return how many sequences of a tenant run."""
        return self._uses[tenant].running

    def load_of(self, tenant: str, more_sequences: int = 0, more_blocks: int = 0) -> float:
        """Return a tenant's load if it held so much more."""
        use = self._uses[tenant]
        places = (use.running + more_sequences) / self._places
        blocks = (use.blocks + more_blocks) / self._pool_blocks
        return max(places, blocks) * self._weights / use.weight

    def remove_sequence(self, sequence: Sequence) -> None:
        """Count a sequence that runs as if it had left."""
        self._uses[sequence.tenant] = self._uses[sequence.tenant].more(-1, -sequence.own_blocks)
