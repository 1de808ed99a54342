"""Flags of other engines: the option that is named exists, and none of Quire's own flags is answered as foreign."""

from __future__ import annotations

import pytest

from cli.config import UpSettings
from common.settings.config import FOREIGN, OURS, advice, flag_of
from router.config import RouterSettings


def test_every_option_that_is_named_is_one_of_the_suite_or_of_the_router() -> None:
    options = {*UpSettings.model_fields, *RouterSettings.model_fields}
    assert {key.removeprefix("no_") for key in OURS.values()} <= options


def test_no_flag_of_the_suite_is_taken_for_a_foreign_one() -> None:
    ours = {flag_of(key) for settings in (UpSettings, RouterSettings) for key in settings.model_fields}
    assert not ours & FOREIGN


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--served-model-name", "is not an option here; --model-name is the same"),
        ("-c", "is not an option here; --max-model-len is the same"),
        ("--max-running-requests", "is not an option here; --max-num-seqs is the same"),
        ("--mem-fraction-static", "is not an option here; --gpu-memory-utilization is the same"),
        ("--http-port", "is not an option here; --port is the same"),
        ("--disable-radix-cache", "is not an option here; --no-prefix-caching is the same"),
        ("--num-shard", "is not an option here; --tensor-parallel-size is the same"),
        (
            "--nnodes",
            (
                "is not there: --tensor-parallel-size N runs a model in N processes, on several hosts by WORLD_SIZE, "
                "RANK, MASTER_ADDR and MASTER_PORT; --workers N starts N replicas of it"
            ),
        ),
        ("--model-draft", "is not an option here; --draft-model is the same"),
        ("--draft-max", "is not there: drafts are as many as pay"),
        ("--lora-modules", "is not an option here; --lora is the same"),
        ("--enable-lora", "is not there: --lora NAME=DIR and --lora-dir serve adapters"),
        ("--bogus", None),
    ],
)
def test_advice_names_our_option_or_the_reason(flag: str, said: str | None) -> None:
    assert advice(flag, UpSettings.model_fields) == said
