"""The tokenizer's files as one ZIP archive, in pieces: a gateway reads them to make tokens of texts by itself."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Final

from quire.vllm.v1 import engine_common_pb2 as pb
from router.answers.text.tokenizer_files import TokenizerFiles

# Entries have this time, so that the archive of a checkpoint is always the same: the first that ZIP has.
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


class _Pieces(io.RawIOBase):
    """What an archive's writer has written since it was last taken; the writer cannot go back in it."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: bytes) -> int:  # type: ignore[override]
        self._held += content
        self.digest.update(content)
        return len(content)

    def take(self) -> bytes:
        taken = bytes(self._held)
        self._held.clear()
        return taken


async def archive_of(files: TokenizerFiles) -> AsyncGenerator[pb.GetTokenizerChunk, None]:
    """Yield the archive, uncompressed, a piece of a file at a time. Raises what `TokenizerFiles.pieces` does."""
    held, name, entry = _Pieces(), "", None
    # An entry that is open keeps its archive from being closed.
    with zipfile.ZipFile(held, "w") as archive, ExitStack() as entries:
        async with aclosing(files.pieces()) as pieces:
            async for piece in pieces:
                if entry is None or piece.file != name:
                    entries.close()
                    name = piece.file
                    entry = entries.enter_context(archive.open(zipfile.ZipInfo(name, _EPOCH), "w"))
                entry.write(piece.content)
                yield pb.GetTokenizerChunk(data=held.take())
    yield pb.GetTokenizerChunk(data=held.take(), sha256=held.digest.hexdigest())
