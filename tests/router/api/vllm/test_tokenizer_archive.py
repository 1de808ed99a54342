"""The archive of a tokenizer's files: what a gateway that leaves, and a file that changes, do to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast

import pytest

from common.contracts.errors import Unavailable
from router.answers.text.tokenizer_files import Piece, TokenizerFiles
from router.api.vllm.tokenizer_archive import archive_of


class Files:
    """Files of which the second one changes while it is sent."""

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        for piece in (Piece("a", b"1"), Piece("a", b"2", b"s"), Piece("b", b"3")):
            yield piece
        raise Unavailable("b has changed")


@pytest.mark.parametrize("chunks", [0, 1, 2, 3])
async def test_a_client_may_leave_anywhere(chunks: int) -> None:
    archive = archive_of(cast("TokenizerFiles", Files()))
    for _ in range(chunks):
        assert (await anext(archive)).data
    await archive.aclose()


async def test_a_file_that_changes_is_the_error() -> None:
    archive = archive_of(cast("TokenizerFiles", Files()))
    with pytest.raises(Unavailable, match="b has changed"):
        [_ async for _ in archive]
