"""Options of the worker that are right one by one and wrong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuworker.config import GpuWorkerSettings


def problems(**options: object) -> list[str]:
    settings = GpuWorkerSettings.model_validate({"model": "m", **options})
    return [f"{each.field} {each.description}" for each in settings.problems()]


def test_a_step_has_room_for_a_token_of_each_sequence() -> None:
    (said,) = problems(max_num_seqs=65, max_num_batched_tokens=64)
    assert said == (
        "--max-num-batched-tokens is 64, and a step has up to 65 sequences with a token each; expected at least 65, "
        "or a lower --max-num-seqs"
    )
    assert problems(max_num_seqs=64, max_num_batched_tokens=64) == []


@pytest.mark.parametrize(("given", "budget", "sequences"), [(None, 48, 48), (None, 2048, 64), (7, 48, 7)])
def test_by_default_a_step_has_no_more_sequences_than_tokens(given: int | None, budget: int, sequences: int) -> None:
    settings = GpuWorkerSettings(model="m", max_num_seqs=given, max_num_batched_tokens=budget)
    assert settings.num_seqs(64) == sequences


GIB = 1 << 30


def test_blocks_come_from_disk_by_way_of_host_memory() -> None:
    assert problems(disk_cache="d") == [
        "--disk-cache keeps blocks that come back by way of host memory, and there is none; add --host-memory 1GiB"
    ]
    assert problems(disk_cache="d", host_memory="1GiB") == []


def test_prompts_pass_from_worker_to_worker_by_their_data_ports() -> None:
    assert problems(disaggregation="prefill") == [
        "--disaggregation is prefill, and blocks pass between workers by --data-port; add it, with --host-memory"
    ]
    assert problems(disaggregation="decode", data_port=0, host_memory="1GiB") == []


def test_a_disk_cache_keeps_cached_blocks() -> None:
    assert problems(disk_cache="d", host_memory="1GiB", prefix_caching=False) == [
        "--host-memory keeps cached blocks, and --no-prefix-caching keeps none; leave out one of them",
        "--disk-cache keeps cached blocks, and --no-prefix-caching keeps none; leave out one of them",
    ]


def test_a_disk_cache_has_16_gib_unless_a_size_says_otherwise() -> None:
    def size(**options: object) -> int:
        return GpuWorkerSettings.model_validate({"model": "m", **options}).disk_cache_bytes

    assert [size(), size(disk_cache="d"), size(disk_cache=Path("d"), disk_cache_size="100GiB")] == [
        0,
        16 * GIB,
        100 * GIB,
    ]
    assert problems(disk_cache_size="1GiB") == [
        "--disk-cache-size is the size of a --disk-cache, and there is none; add it"
    ]


def test_a_data_port_needs_host_memory_and_a_data_address_needs_a_data_port() -> None:
    assert problems(data_port=0) == [
        "--data-port is for blocks that come by way of host memory, and there is none; add --host-memory 1GiB"
    ]
    assert problems(data_port=0, host_memory="1GiB") == []
    assert problems(data_address="10.0.0.1:7000") == [
        "--data-address is where others reach --data-port, and there is none; add it"
    ]
    assert problems(data_port=0, data_address="10.0.0.1:7000", host_memory="1GiB") == []
    assert problems(carrier="nixl") == [
        "--carrier is nixl, and blocks come from other workers by --data-port alone; add it"
    ]
    assert problems(carrier="nixl", data_port=0, host_memory="1GiB") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_memory": "1GiB"}, "--host-memory moves whole blocks, and each of 2 ranks has a part of every block"),
        ({"model_impl": "transformers"}, "--tensor-parallel-size is 2, and --model-impl transformers is run by one"),
        (
            {"deterministic": True},
            "--tensor-parallel-size is 2, and --deterministic is promised between workers of one",
        ),
        ({"quantization": "auto"}, "--tensor-parallel-size is 2, and --quantization auto is chosen by times, which"),
        ({"draft_model": "d"}, "--tensor-parallel-size is 2, and --draft-model is run by one process; use"),
        ({"simulate": "base=1ms"}, "--tensor-parallel-size is 2, and --simulate runs no model that could be cut"),
        ({"device": "cuda:0"}, "--tensor-parallel-size is 2, and --device cuda:0 has ranks on CPUs alone, so far"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_ranks_do_not_do_is_refused(options: dict[str, object], said: str) -> None:
    (found,) = problems(tensor_parallel_size=2, **options)
    assert found.startswith(said)
    assert not [each for each in problems(**options) if "tensor-parallel" in each]


def test_there_are_at_most_16_ranks() -> None:
    assert GpuWorkerSettings(model="m", tensor_parallel_size=16).tensor_parallel_size == 16
    with pytest.raises(ValueError, match="less than or equal to 16"):
        GpuWorkerSettings(model="m", tensor_parallel_size=17)
