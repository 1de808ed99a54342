"""Records that the client makes of messages."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from quire.api.types import KvGroup, KvGroupKind
from quire.client import Model
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types

GROUPS = (
    types.KvGroup(kind=types.KV_GROUP_KIND_FULL, pages=2, layers=[1]),
    types.KvGroup(kind=types.KV_GROUP_KIND_CHUNK, span=64, pages=1, layers=[0, 2]),
)


@pytest.mark.parametrize("groups", [(), GROUPS])
def test_a_model_has_the_groups_of_its_pool(groups: tuple[types.KvGroup, ...]) -> None:
    identity = types.PoolIdentity(block_size=16, kv_geometry=types.KvGeometry(num_layers=3, groups=groups))
    model = Model.from_proto(pb.GetModelResponse(model="m", identity=identity))
    wanted = (KvGroup(KvGroupKind.FULL, 0, 2, (1,)), KvGroup(KvGroupKind.CHUNK, 64, 1, (0, 2)))
    assert model.identity.kv_geometry.groups == wanted[: len(groups)]
    assert len(json.loads(json.dumps(asdict(model)))["identity"]["kv_geometry"]["groups"]) == len(groups)
