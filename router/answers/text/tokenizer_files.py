"""The files of the tokenizer in use, in pieces, for clients that tokenise by themselves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.contracts.errors import Overloaded, QuotaViolation, Unavailable

PIECE_BYTES: Final = 256 << 10
# Streams at once: each holds one piece.
STREAMS: Final = 16
_NAMES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
)
_TEMPLATE: Final = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a file; `sha256` of the whole file comes with the last one."""

    file: str
    content: bytes
    sha256: bytes = b""


class TokenizerFiles:
    """The files in `folder`; `chat_template` is a file that is used instead of the folder's template."""

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        self._paths = {name: folder / name for name in _NAMES if (folder / name).is_file()}
        if chat_template is not None:
            self._paths[_TEMPLATE] = chat_template
        self._manifest: Mapping[str, bytes] | None = None
        self._streams = 0

    async def fingerprint(self) -> str:
        """Return 32 hexadecimal digits for names and contents of all files."""
        digest = hashlib.sha256(b"quire-tokenizer-files-v1")
        for name, content in (await self._hashes()).items():
            digest.update(name.encode() + b"\0" + content)
        return digest.hexdigest()[:32]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield every file from its beginning to its end.

        Raises Overloaded when too many streams run, Unavailable when a file has changed since the router read it.
        """
        if self._streams >= STREAMS:
            what = f"{STREAMS} are being sent, which is the most"
            raise Overloaded(QuotaViolation("router.tokenizer_files", what), 1.0)
        self._streams += 1
        try:
            for name, expected in (await self._hashes()).items():
                async for piece in self._file(name, expected):
                    yield piece
        finally:
            self._streams -= 1

    async def _hashes(self) -> Mapping[str, bytes]:
        if self._manifest is None:
            self._manifest = await asyncio.to_thread(_hashed, self._paths)
        return self._manifest

    async def _file(self, name: str, expected: bytes) -> AsyncGenerator[Piece, None]:
        digest = hashlib.sha256()
        with await asyncio.to_thread(self._paths[name].open, "rb") as file:
            content = await asyncio.to_thread(file.read, PIECE_BYTES)
            while True:
                digest.update(content)
                following = await asyncio.to_thread(file.read, PIECE_BYTES)
                if not following:
                    break
                yield Piece(name, content)
                content = following
        if digest.digest() != expected:
            raise Unavailable(f"{name} has changed since the router read it; the router must be started again")
        yield Piece(name, content, expected)


def _hashed(paths: Mapping[str, Path]) -> dict[str, bytes]:
    found = {}
    for name, path in sorted(paths.items()):
        with path.open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").digest()
    return found
