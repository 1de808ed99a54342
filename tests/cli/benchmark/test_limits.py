"""The limits that bind, from exact measurements."""

from __future__ import annotations

from dataclasses import replace

from cli.benchmark.limits import Limit, Measured, limits

MEASURED = Measured(
    read_rate=20e9,
    weight_bytes=500_000_000,
    one_stream=32.0,
    cores=4,
    cores_busy=3.6,
    busy_streams=32,
    slots=65536,
    max_model_len=8192,
    max_num_seqs=64,
)


def test_each_limit_has_its_share_and_its_numbers() -> None:
    assert limits(MEASURED) == [
        Limit("memory bandwidth", True, 0.8, "one stream reads 16.0 of 20.0 GB/s: 500 MB a token"),
        Limit("cores", True, 0.9, "3.6 of 4 busy with 32 streams"),
        Limit("KV blocks", False, 1.0, "the pool holds 65,536 tokens: 32 sequences of 2,048; up to 64 run"),
    ]


def test_what_is_far_from_its_limit_does_not_bind() -> None:
    found = limits(replace(MEASURED, one_stream=8.0, cores_busy=2.0, slots=1 << 20))
    assert [(each.binds, each.share) for each in found] == [(False, 0.2), (False, 0.5), (False, 32 / 512)]


def test_small_weights_come_from_the_caches() -> None:
    found = limits(replace(MEASURED, one_stream=80.0))[0]
    assert (found.binds, found.share) == (False, 2.0)
    assert found.words == "weights of 500 MB come from the caches; memory gives 20.0 GB/s"


def test_a_pool_of_fewer_sequences_than_were_measured_binds() -> None:
    found = limits(replace(MEASURED, slots=65535))[-1]
    assert (found.binds, found.share) == (True, 1.0)
    assert "31 sequences of 2,048" in found.words


def test_a_short_model_needs_few_blocks() -> None:
    found = limits(replace(MEASURED, max_model_len=512, max_num_seqs=8, slots=4096))[-1]
    assert (found.binds, found.share) == (False, 1.0)
    assert found.words == "the pool holds 4,096 tokens: 8 sequences of 512; up to 8 run"


def test_what_was_not_measured_is_left_out() -> None:
    assert [each.name for each in limits(replace(MEASURED, read_rate=None, cores_busy=None))] == ["KV blocks"]
    assert [each.name for each in limits(replace(MEASURED, one_stream=None))] == ["cores", "KV blocks"]
