"""Which cache domains sent the same prompt, so that a miss by separate domains can be told from a new prompt.

Blocks of different domains have different hashes, and no service compares their content. This memory holds keyed
fingerprints of leading blocks, at 1, 2, 4, 8, ... blocks, with the last two domains that sent each. It answers
operators alone: a client must not learn what others send.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

MAX_PREFIXES: Final = 8_192


@dataclass(frozen=True, slots=True)
class SentBy:
    """A cache domain and the tenant that used it."""

    domain: bytes
    tenant: str


@dataclass(frozen=True, slots=True)
class SeenElsewhere:
    """How many leading blocks of a prompt another domain sent, and whose domain that was."""

    blocks: int = 0
    sender: SentBy | None = None


NOWHERE: Final = SeenElsewhere()


class DomainsSeen:
    """Remembers the prefixes that were sent last. `key` is random: fingerprints mean nothing outside this process."""

    def __init__(self, key: bytes, max_prefixes: int = MAX_PREFIXES) -> None:
        self._key, self._most = key, max_prefixes
        self._sent: OrderedDict[bytes, tuple[SentBy, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, packed_tokens: bytes, block_bytes: int, sender: SentBy) -> SeenElsewhere:
        """Remember a prompt of a sender; return the longest remembered prefix of it that only others have sent."""
        found, digest, begin, blocks = NOWHERE, blake2b(key=self._key, digest_size=8), 0, 1
        while blocks * block_bytes <= len(packed_tokens):
            digest.update(packed_tokens[begin : blocks * block_bytes])
            begin = blocks * block_bytes
            other = self._remember(digest.copy().digest(), sender)
            if other is not None:
                found = SeenElsewhere(blocks, other)
            blocks *= 2
        return found

    def _remember(self, fingerprint: bytes, sender: SentBy) -> SentBy | None:
        """Note that a sender sent a prefix; return another sender of it, unless this one has sent it before."""
        before = self._sent.pop(fingerprint, ())
        others = tuple([each for each in before if each.domain != sender.domain])
        self._sent[fingerprint] = (*others[-1:], sender)
        if len(self._sent) > self._most:
            self._sent.popitem(last=False)
        return others[-1] if others and len(others) == len(before) else None
