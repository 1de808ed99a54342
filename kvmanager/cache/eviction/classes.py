"""The classes of blocks whose reuse a policy learns apart.

A block counts its uses. A new block that extends a chain whose last block ended a request inherits the count of that
block: the next turn of a conversation is as likely as that of its earlier blocks. Any other new block begins at one.
Blocks of one use are told apart by how often the block before them was used, the others by the mean time between uses.
"""

from __future__ import annotations

from typing import Final

MOST_USES: Final = 127
_USES: Final = (2, 4, 9, MOST_USES)
_ORIGINS: Final = (0, 2, 8, MOST_USES)
_PACES: Final = 12
CLASSES: Final = len(_ORIGINS) + len(_USES) * _PACES


def _steps(bounds: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(next(k for k, most in enumerate(bounds) if uses <= most) for uses in range(MOST_USES + 1))


_ORIGIN_OF: Final = _steps(_ORIGINS)
_USES_OF: Final = tuple(len(_ORIGINS) + step * _PACES for step in _steps(_USES))


def class_of(uses: int, origin: int, span: int) -> int:
    """Return the class of a block. `origin` counts the uses of the block before it when it was registered (0: none).

    `span` is the time between the first and the last use.
    """
    if uses == 1:
        return _ORIGIN_OF[origin]
    return _USES_OF[uses] + min(_PACES - 1, (span // (uses - 1)).bit_length() >> 1)
