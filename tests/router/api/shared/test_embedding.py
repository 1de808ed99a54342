"""Requests for embeddings before they are run."""

from __future__ import annotations

from typing import Any

from common.contracts.limits import MAX_EMBEDDING_INPUTS
from quire.inference.v1 import inference_pb2 as pb
from router.api.shared.embedding import Embedder
from tests.support.router.validation import CALL, validator
from tests.support.turns import counted_turns


async def test_others_have_their_turns_while_many_inputs_are_validated() -> None:
    nobody: Any = None
    inputs = [pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6]))] * MAX_EMBEDDING_INPUTS
    async with counted_turns() as turns:
        before = turns.count
        asked = await Embedder(nobody, validator(), 8).validated(pb.EmbedRequest(inputs=inputs), CALL, 1, 1 << 30)
        assert turns.count - before >= MAX_EMBEDDING_INPUTS - 1
    assert len(asked.inputs) == MAX_EMBEDDING_INPUTS
