"""Who may attach, under which epoch, and whose reports count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import NotFound
from common.contracts.lease import Attach, AttachOk, AttachRejected
from common.contracts.types import BlockHash, KvGeometry, PoolIdentity
from kvmanager.cache.pins import Pin
from kvmanager.contracts.ledger_config import LedgerConfig, ManagerConfig
from kvmanager.ledger.registry import WorkerRegistration, WorkerRegistry
from tests.support.kvmanager.ledgers import EMPTY, counted_ids

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim_k=8, head_dim_v=8, dtype="float32")
IDENTITY = PoolIdentity("model" * 6, "tokenizer" * 3, 16, GEOMETRY)


def of_geometry(**changes: Any) -> PoolIdentity:
    return replace(IDENTITY, kv_geometry=replace(GEOMETRY, **changes))


def make_manager(epoch: int = 5, **options: Any) -> WorkerRegistry:
    return WorkerRegistry(ManagerConfig(**options), ManualClock(), counted_ids(), epoch)


def attach(worker: str = "w0", session: int = 1, **options: Any) -> Attach:
    options.setdefault("identity", IDENTITY)
    return Attach(
        worker, b"i" * 16, session, options.pop("epoch_seen", 0), num_blocks=options.pop("blocks", 8), **options
    )


def opened(manager: WorkerRegistry, request: Attach) -> WorkerRegistration:
    answer = manager.attach(request)
    assert isinstance(answer, WorkerRegistration)
    return answer


def refused(manager: WorkerRegistry, request: Attach) -> AttachRejected:
    answer = manager.attach(request)
    assert isinstance(answer, AttachRejected)
    return answer


def test_a_worker_attaches_and_is_answered_once_its_inventory_is_in() -> None:
    manager = make_manager()
    session = opened(manager, attach(max_num_seqs=3))
    assert manager.workers() == ()
    with pytest.raises(NotFound):
        manager.ledger("w0")
    assert manager.complete(session, EMPTY) == AttachOk(epoch=5, lease_target=0)
    assert manager.workers() == ("w0",)
    assert manager.ledger("w0") is session.ledger
    assert session.ledger.state.config == LedgerConfig(8, 16, max_num_seqs=3)


def test_the_epoch_never_falls() -> None:
    manager = make_manager(epoch=5)
    manager.adopt_epoch(3)
    assert manager.epoch == 5


def test_a_worker_that_has_seen_a_higher_epoch_is_not_answered_before_one_is_taken() -> None:
    manager = make_manager(epoch=1)
    session = opened(manager, attach(epoch_seen=40))
    assert manager.needs_epoch(session.attach)
    with pytest.raises(ValueError, match="epoch 40"):
        manager.complete(session, EMPTY)
    manager.adopt_epoch(41)
    assert manager.complete(session, EMPTY).epoch == 41


def test_a_second_attach_waits_until_the_first_session_is_over() -> None:
    manager = make_manager()
    first = opened(manager, attach())
    answer = refused(manager, attach(session=2))
    assert answer.retry
    assert "w0" in answer.reason
    manager.detach(first)
    second = opened(manager, attach(session=2))
    assert manager.is_current(second)
    assert not manager.is_current(first)


def test_a_late_end_of_a_replaced_session_does_not_touch_the_new_one() -> None:
    manager = make_manager()
    first = opened(manager, attach())
    manager.detach(first)
    second = opened(manager, attach(session=2))
    manager.detach(first)
    assert manager.is_current(second)
    assert (first.key, second.key) == ((b"i" * 16, 1), (b"i" * 16, 2))


def test_with_the_last_session_an_identity_that_was_not_configured_may_go() -> None:
    manager = make_manager()
    first, second = opened(manager, attach("first")), opened(manager, attach("second"))
    manager.detach(first)
    manager.forget_identity()
    assert manager.identity == IDENTITY
    manager.detach(second)
    manager.forget_identity()
    other = replace(IDENTITY, model_fingerprint="other")
    opened(manager, attach("third", identity=other))
    assert manager.identity == other


def test_a_configured_identity_stays() -> None:
    manager = make_manager(identity=IDENTITY)
    manager.detach(opened(manager, attach()))
    manager.forget_identity()
    assert manager.identity == IDENTITY


@pytest.mark.parametrize(
    ("theirs", "field", "ours", "other", "flag"),
    [
        (replace(IDENTITY, block_size=32), "block_size", "16", "32", "--block-size"),
        (replace(IDENTITY, model_fingerprint="m2"), "model_fingerprint", "model" * 6, "m2", "--model"),
        (
            replace(IDENTITY, tokenizer_fingerprint="t2"),
            "tokenizer_fingerprint",
            "tokenizer" * 3,
            "t2",
            "--model or --tokenizer",
        ),
        (of_geometry(dtype="bfloat16"), "kv_geometry.dtype", "float32", "bfloat16", "--dtype or --kv-cache-dtype"),
        (of_geometry(num_layers=3), "kv_geometry.num_layers", "2", "3", "--model"),
    ],
    ids=["block size", "model", "tokenizer", "dtype", "layers"],
)  # fmt: skip
@pytest.mark.parametrize("configured", [True, False])
def test_a_worker_of_another_kind_is_refused_with_both_values_and_the_flag(
    theirs: PoolIdentity, field: str, ours: str, other: str, flag: str, configured: bool
) -> None:
    manager = make_manager(identity=IDENTITY if configured else None)
    if not configured:
        manager.detach(opened(manager, attach("first")))
    answer = refused(manager, attach(identity=theirs))
    assert not answer.retry
    (mismatch,) = answer.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs, mismatch.flag) == (field, ours, other, flag)
    assert ours in answer.reason
    assert other in answer.reason
    assert flag in answer.reason


@pytest.mark.parametrize("wrong", [{"blocks": 0}, {"max_num_seqs": 0}, {"worker": ""}])
def test_an_attach_without_substance_is_refused_and_fixes_no_identity(wrong: dict[str, Any]) -> None:
    manager = make_manager()
    assert not refused(manager, attach(**wrong)).retry
    assert manager.identity is None


def test_workers_have_ledgers_of_their_own() -> None:
    manager = make_manager(runway="max")
    sessions = [opened(manager, attach(worker, blocks=blocks)) for worker, blocks in (("w1", 4), ("w0", 6))]
    for session in sessions:
        manager.complete(session, EMPTY)
    assert manager.workers() == ("w0", "w1")
    assert [manager.ledger(worker).state.config.num_blocks for worker in manager.workers()] == [6, 4]
    assert manager.ledger("w0").state.config.runway == "max"


def test_a_worker_that_is_too_large_is_refused_for_good_with_the_setting() -> None:
    answer = refused(make_manager(max_blocks_per_worker=10), attach(blocks=11))
    assert answer.reason == "the worker brings 11 blocks; the manager takes at most 10 (--max-blocks-per-worker)"
    assert not answer.retry
    opened(make_manager(max_blocks_per_worker=10), attach(blocks=10))
    answer = refused(make_manager(max_blocks_per_worker=10), attach(blocks=10, host_frames=11))
    assert answer.reason.startswith("the worker brings 11 blocks in host memory; the manager takes at most 10")
    answer = refused(make_manager(max_blocks=20), attach(blocks=10, host_frames=11))
    assert answer.reason.startswith("the worker brings 21 blocks with all other workers")


def test_workers_that_are_too_many_or_too_large_together_may_try_again_later() -> None:
    manager = make_manager(max_workers=2, max_blocks=20)
    first = opened(manager, attach("w0", blocks=10))
    answer = refused(manager, attach("w1", blocks=11))
    assert (
        answer.reason
        == "the worker brings 21 blocks with all other workers; the manager takes at most 20 (--max-blocks)"
    )
    assert answer.retry
    opened(manager, attach("w1", blocks=10))
    answer = refused(manager, attach("w2", blocks=1))
    assert (answer.reason.partition("(")[2], answer.retry) == ("--max-workers)", True)
    manager.detach(first)
    opened(manager, attach("w2", blocks=10))


def test_pins_that_change_during_a_rebuild_are_carried_out_at_its_end() -> None:
    manager = make_manager(pin_share=0.5)
    manager.pins.set([Pin("before", "", (BlockHash(b"1" * 16),), 16)])
    session = opened(manager, attach())
    steps = manager.rebuild_in_steps(session, EMPTY)
    next(steps)
    manager.pins.set([Pin("after", "", (BlockHash(b"2" * 16),), 16)])
    for _ in steps:
        pass
    manager.finish_rebuild(session)
    assert list(session.ledger.state.store.retention.pinned) == [b"2" * 16]
