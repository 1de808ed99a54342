"""How many cached blocks each tenant retains, and which tenant retains the most."""

from __future__ import annotations

from collections import OrderedDict

from common.contracts.types import BlockId


class Holdings:
    """The retained blocks of each tenant, the first released first. Each method takes O(1), however many tenants
    there are.
    """

    __slots__ = ("_by_count", "_by_tenant", "_top", "total")

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[BlockId, None]] = {}
        # The tenants that retain so many blocks, and the largest number among them; 0: nothing is retained.
        self._by_count: dict[int, dict[str, None]] = {}
        self._top = self.total = 0

    def clear(self) -> None:
        self._by_tenant.clear()
        self._by_count.clear()
        self._top = self.total = 0

    def count(self, tenant: str) -> int:
        return len(self._by_tenant.get(tenant, ()))

    def first(self, tenant: str) -> BlockId:
        """Return the block of a tenant that was released first. The tenant retains one."""
        return next(iter(self._by_tenant[tenant]))

    def largest(self, tenant: str) -> str:
        """Return who retains the most: of equals this tenant, or the one that has had so many for the longest time."""
        equals = self._by_count[self._top]
        return tenant if tenant in equals else next(iter(equals))

    def add(self, tenant: str, block: BlockId) -> None:
        mine = self._by_tenant.setdefault(tenant, OrderedDict())
        mine[block] = None
        self.total += 1
        self._move(tenant, len(mine) - 1, len(mine))

    def remove(self, tenant: str, block: BlockId) -> None:
        mine = self._by_tenant[tenant]
        del mine[block]
        if not mine:
            del self._by_tenant[tenant]
        self.total -= 1
        self._move(tenant, len(mine) + 1, len(mine))

    def _move(self, tenant: str, before: int, after: int) -> None:
        """Note that a tenant retains one block more, or one less. So the largest number changes by one at most."""
        if before:
            equals = self._by_count[before]
            del equals[tenant]
            if not equals:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[tenant] = None
        if after > self._top or (before == self._top and before not in self._by_count):
            self._top = after
