"""What a worker finds before it imports torch: devices, lengths and sizes that cannot be, with the numbers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.checkpoint.files import weight_bytes
from common.checkpoint.gguf.folder import gguf_folder
from common.checkpoint.gguf.memory import weight_memory
from common.contracts.errors import InvalidConfig
from common.settings.config import load
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import GIB, NO_KV_MEMORY
from gpuworker.native import levels
from gpuworker.plane import preflight
from gpuworker.plane.preflight import Machine, follows_another_host, problems
from tests.support.gguf_files import write_model

CPU = Machine(torch="2.13.0+cpu", cuda_devices=0, available_bytes=16 * GIB, address_space=None)
ONE_GPU = Machine(torch="2.13.0", cuda_devices=1, available_bytes=16 * GIB, address_space=None, triton="3.7.1")
UNKNOWN = Machine(torch=None, cuda_devices=None, available_bytes=16 * GIB, address_space=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 1024}))
    return path


def found(folder: Path, machine: Machine, *flags: str, workers: int = 1) -> dict[str, str]:
    words = ("--model", str(folder), "--load-format", "dummy", *flags)
    settings = load(GpuWorkerSettings, words, {})
    return {each.field: each.description for each in problems(settings, folder, machine, workers)}


@pytest.mark.parametrize(
    ("device", "machine", "words"),
    [
        (
            "cuda",
            CPU,
            "is 'cuda', and the installed torch 2.13.0+cpu is built for CPUs alone; use --device cpu",
        ),
        (
            "cuda",
            Machine("2.13.0", 0, 16 * GIB, None),
            "is 'cuda', and no CUDA device is usable here; use --device cpu",
        ),
        ("cuda:1", ONE_GPU, "is 'cuda:1', and CUDA devices here end at cuda:0; use --device cpu"),
        ("gpu", CPU, "is 'gpu'; expected auto, cpu, cuda or cuda:N"),
    ],
    ids=["cpu build", "no device", "number", "name"],
)
def test_a_device_that_is_not_there_is_named(device: str, machine: Machine, words: str, folder: Path) -> None:
    assert found(folder, machine, "--device", device) == {"--device": words}


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_without_triton_is_refused_with_what_to_install(device: str, folder: Path) -> None:
    words = f"is {device!r}, and the kernels for the GPU here need triton: pip install 'quire-llm[gpu]'"
    without = replace(ONE_GPU, triton=None)
    assert found(folder, without, "--device", device) == {"--device": f"{words}, or use --device cpu"}
    assert found(folder, without, "--device", "cpu") == found(folder, replace(CPU, triton=None)) == {}


def test_a_level_that_the_processor_lacks_is_named(folder: Path) -> None:
    machine = replace(CPU, processor=frozenset({"avx2", "fma", "f16c", "bmi2"}))
    said = "is avx512: this processor lacks avx512bw, avx512dq, avx512f, avx512vl; it runs scalar, avx2"
    assert found(folder, machine, "--cpu-level", "avx512") == {"--cpu-level": f"{said}; or leave it at auto"}


def test_a_level_that_was_not_built_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "library", lambda level: tmp_path / f"{level}.so")
    said = found(folder, CPU, "--cpu-level", "scalar")["--cpu-level"]
    assert said.startswith("is scalar: scalar.so was not built")
    assert "`make install`" in said
    assert said.endswith("or leave it at auto")


def test_more_threads_than_cpus_are_refused(folder: Path) -> None:
    two = replace(CPU, cpus=2)
    assert found(folder, two, "--threads", "2") == found(folder, CPU, "--threads", "999") == {}
    said = "is 999, and a process may use 2 cpus here: threads that share a cpu stall each other; give at most 2"
    assert found(folder, two, "--threads", "999") == {"--threads": f"{said}, or leave it out"}


def test_an_unknown_level_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="expected auto, " + ", ".join(levels.NAMES[:-1])):
        found(folder, CPU, "--cpu-level", "avx3")


@pytest.mark.parametrize("level", levels.NAMES)
def test_every_level_is_an_option(level: str, folder: Path) -> None:
    load(GpuWorkerSettings, ("--model", str(folder), "--cpu-level", level), {})
    assert load(GpuWorkerSettings, ("--model", str(folder)), {"QUIRE_CPU_LEVEL": level}).cpu_level == level


@pytest.mark.parametrize(("device", "machine"), [("auto", CPU), ("cpu", CPU), ("cuda", ONE_GPU), ("cuda:3", UNKNOWN)])
def test_a_device_that_may_be_there_is_left_to_torch(device: str, machine: Machine, folder: Path) -> None:
    assert found(folder, machine, "--device", device) == {}


def test_a_length_beyond_the_models_positions_is_refused_with_both(folder: Path) -> None:
    assert found(folder, CPU, "--max-model-len", "1024") == {}
    words = "is 1025; the model's positions end at 1024: lower it, or leave it out"
    assert found(folder, CPU, "--max-model-len", "1025") == {"--max-model-len": words}


def test_a_stored_head_that_cannot_be_computed_is_refused_unless_an_option_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "models.Transformer"}, {"type": "models.Dense"}]))
    assert "the parts Transformer, Dense" in found(tmp_path, CPU)["--model"]
    assert found(tmp_path, CPU, "--pooling", "mean") == found(tmp_path, CPU, "--pooling", "none") == {}


def test_simulated_steps_pool_nothing(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="--pooling: is last, and --simulate runs no model"):
        found(folder, CPU, "--simulate", "--pooling", "last")
    assert found(folder, CPU, "--simulate", "--pooling", "none") == {}


def test_a_cache_beyond_the_memory_is_refused_with_both(folder: Path) -> None:
    words = "asks for 1.0 TiB, and 16.0 GiB of memory are free here; give less"
    assert found(folder, CPU, "--kv-memory", "1TiB") == {"--kv-memory": words}
    words = "asks for 9.0 GiB for each of 2 workers, and 16.0 GiB of memory are free here; give less"
    assert found(folder, CPU, "--kv-memory", "9GiB", workers=2) == {"--kv-memory": words}
    assert found(folder, CPU, "--kv-memory", "9GiB") == {}
    assert found(folder, ONE_GPU, "--kv-memory", "40GiB") == {}, "it may lie on the GPU"


def test_more_blocks_than_the_memory_holds_are_refused(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8, **shape}))
    # A block of 16 positions takes 2 x 2 layers x 64 values of 2 bytes a position: 8 KiB.
    assert found(tmp_path, CPU, "--kv-blocks", str(2 << 20)) == {}
    words = "asks for 24.0 GiB, and 16.0 GiB of memory are free here; give less"
    assert found(tmp_path, CPU, "--kv-blocks", str(3 << 20)) == {"--kv-blocks": words}
    assert found(tmp_path, CPU, "--kv-blocks", str(3 << 20), "--kv-cache-dtype", "fp8") == {}


def test_a_pool_of_latents_counts_latents(tmp_path: Path) -> None:
    """deepseek_v3: 61 layers of 512 + 64 numbers, not of 128 heads."""
    sizes = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config = {"model_type": "deepseek_v3", "dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fitting = 16 * GIB // (16 * 576 * 61 * 2)
    assert found(tmp_path, CPU, "--kv-blocks", str(fitting)) == {}
    assert "--kv-blocks" in found(tmp_path, CPU, "--kv-blocks", str(fitting + 1))


def test_a_pool_counts_the_index_keys_of_layers_with_an_indexer(tmp_path: Path) -> None:
    """61 layers of 576 numbers, and 128 more in those whose indexer is their own."""
    sizes = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config = {"model_type": "glm_moe_dsa", "dtype": "bfloat16", "index_head_dim": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fitting = 16 * GIB // (16 * 61 * (576 + 128) * 2)
    assert found(tmp_path, CPU, "--kv-blocks", str(fitting)) == {}
    assert "--kv-blocks" in found(tmp_path, CPU, "--kv-blocks", str(fitting + 1))
    (tmp_path / "config.json").write_text(json.dumps(config | {"indexer_types": ["full", *["shared"] * 60]}))
    fitting = 16 * GIB // (16 * (61 * 576 + 128) * 2)
    assert found(tmp_path, CPU, "--kv-blocks", str(fitting)) == {}
    assert "--kv-blocks" in found(tmp_path, CPU, "--kv-blocks", str(fitting + 1))


def test_a_pool_counts_no_layer_that_shares(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 35, "num_kv_shared_layers": 15, "num_attention_heads": 8, "head_dim": 256}
    config = {"model_type": "gemma3n_text", "dtype": "bfloat16", "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fitting = 16 * GIB // (16 * 20 * 2 * 2 * 256 * 2)
    assert found(tmp_path, CPU, "--kv-blocks", str(fitting)) == {}
    assert "--kv-blocks" in found(tmp_path, CPU, "--kv-blocks", str(fitting + 1))


def test_a_cap_on_addresses_is_refused_with_both(folder: Path) -> None:
    capped = Machine("2.13.0+cpu", 0, 16 * GIB, address_space=4 * GIB)
    words = (
        "caps the addresses of a process at 4.0 GiB, and a worker of this model takes about 7.0 GiB; lift it with"
        " `ulimit -v unlimited`"
    )
    assert found(folder, capped) == {"ulimit -v": words}


def test_a_gguf_file_counts_as_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_folder(write_model(tmp_path / "m.gguf", kind="Q4_K"))
    needed = 7 * GIB + weight_bytes(folder) + weight_memory(folder)  # a process and the least pool take 7 GiB
    flags = ("--load-format", "auto")
    assert found(folder, replace(CPU, address_space=needed), *flags) == {}
    assert list(found(folder, replace(CPU, address_space=needed - 1), *flags)) == ["ulimit -v"]


def test_a_gguf_file_is_held_to_what_the_machine_and_the_model_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_folder(write_model(tmp_path / "m.gguf"))
    flags = ("--load-format", "auto", "--device", "cuda", "--max-model-len", "4096", "--kv-memory", "1TiB")
    assert set(found(folder, CPU, *flags)) == {"--device", "--max-model-len", "--kv-memory"}


def test_all_problems_are_found_at_once(folder: Path) -> None:
    flags = ("--device", "cuda", "--max-model-len", "4096", "--kv-memory", "1TiB")
    assert set(found(folder, CPU, *flags)) == {"--device", "--max-model-len", "--kv-memory"}


def test_a_simulated_worker_needs_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    assert found(tmp_path, CPU, "--simulate", "--device", "cuda") == {}


def test_blocks_that_keep_nothing_are_not_counted_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    flags = ("--max-model-len", "1048576")
    assert found(tmp_path, CPU, *flags, "--kv-blocks", "1048576") == {}
    assert found(tmp_path, CPU, *flags, "--kv-memory", "1MiB") == {"--kv-memory": NO_KV_MEMORY}
    assert found(tmp_path, ONE_GPU, *flags, "--kv-memory", "1MiB", "--device", "cuda") == {"--kv-memory": NO_KV_MEMORY}
    longer = found(tmp_path, CPU, "--max-model-len", "1048577")
    assert longer["--max-model-len"].startswith("is 1048577; the model's positions end at 1048576")


def test_this_machine_can_be_looked_at() -> None:
    here = Machine.here()
    assert here.available_bytes > 0


def test_drafts_are_refused_where_nothing_is_sampled_and_on_cuda(folder: Path) -> None:
    asked = "--speculative", "ngram"
    pooled = "is ngram, and the workers embed prompts, which samples nothing; leave it out"
    cuda = "is ngram, and drafts have never been verified on CUDA; use --device cpu, or leave it out"
    assert found(folder, CPU, *asked) == {}
    assert found(folder, CPU, *asked, "--pooling", "last") == {"--speculative": pooled}
    assert found(folder, ONE_GPU, *asked, "--device", "cuda") == {"--speculative": cuda}


def test_a_disk_cache_that_does_not_fit_is_named_with_the_numbers(folder: Path, tmp_path: Path) -> None:
    flags = ("--host-memory", "1GiB", "--disk-cache", str(tmp_path / "not" / "there"))
    assert found(folder, CPU, *flags, "--disk-cache-size", "1MiB", workers=2) == {}
    said = found(folder, CPU, *flags, "--disk-cache-size", "999TiB", workers=2)["--disk-cache-size"]
    assert said.startswith(f"asks for 999.0 TiB in {tmp_path}/not/there for each of 2 workers, and ")
    assert said.endswith(" are free there, beside 0 B of caches; ask for less")


def test_files_of_disk_caches_count_as_free(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w0").mkdir()
    (tmp_path / "w0" / "images").write_bytes(b"1" * (1 << 20))
    (tmp_path / "other").write_bytes(b"1" * (1 << 20))
    full = os.statvfs_result((4096, 4096, 100, 99, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    flags = ("--host-memory", "1GiB", "--disk-cache", str(tmp_path), "--disk-cache-size")
    assert found(folder, CPU, *flags, "1MiB") == {}
    said = f"asks for 1.1 MiB in {tmp_path}, and 0 B are free there, beside 1.0 MiB of caches; ask for less"
    assert found(folder, CPU, *flags, "1.1MiB") == {"--disk-cache-size": said}


def test_a_disk_cache_needs_a_folder_and_checksums(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(preflight, "checksums_there", lambda: False)
    flags = ("--host-memory", "1GiB", "--disk-cache")
    words = "needs the package xxhash, which is not installed: pip install 'xxhash>=4.1', or leave it out"
    assert found(folder, CPU, *flags, str(tmp_path), "--disk-cache-size", "1MiB") == {"--disk-cache": words}
    monkeypatch.undo()
    words = f"is {tmp_path}/file, which cannot be written; name another folder"
    assert found(folder, CPU, *flags, str(tmp_path / "file")) == {"--disk-cache": words}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-tp", "4"), "is 4, and the worker may use 2 cpus here: ranks that share a cpu wait for each other; use"),
        (("-tp", "2", "--threads", "2"), "is 2 with 2 threads each, and the worker may use 2 cpus here"),
    ],
)
def test_ranks_beyond_the_cpus_are_refused(flags: tuple[str, ...], said: str, folder: Path) -> None:
    problem = found(folder, replace(CPU, cpus=2), *flags)
    assert list(problem) == ["--tensor-parallel-size"]
    assert said in problem["--tensor-parallel-size"]
    assert not found(folder, replace(CPU, cpus=2), "-tp", "2", "--threads", "1")
    assert list(found(folder, replace(CPU, cpus=8), "-tp", "2", "--cpus", "0")) == ["--tensor-parallel-size"]


def test_ranks_that_a_launcher_placed_are_those_of_this_host(folder: Path) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    launched = replace(CPU, cpus=2, launcher=place)
    assert not found(folder, launched, "-tp", "4"), "two of the ranks are here"
    assert "2 of them here" in found(folder, launched, "-tp", "4", "--threads", "2")["--tensor-parallel-size"]
    assert list(found(folder, replace(launched, launcher=place | {"RANK": "2"}), "-tp", "2")) == ["RANK"]
    assert list(found(folder, replace(launched, launcher=place | {"MASTER_ADDR": "10.0.0.1"}), "-tp", "2")) == [
        "--rank-interface"
    ]
    assert not found(folder, replace(launched, launcher={"WORLD_SIZE": "2"})), "one rank asks for nothing of a launcher"
    assert "2 workers would take one place" in found(folder, launched, "-tp", "2", workers=2)["WORLD_SIZE"]
    settings = load(GpuWorkerSettings, ("--model", str(folder), "-tp", "2"), {})
    assert [follows_another_host(settings, place | {"RANK": rank}) for rank in ("0", "1", "9")] == [False, True, False]
