"""Builds a worker's data plane from its options: model, self-test, byte plan, KV cache, step runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from common.checkpoint.gguf.names import served_name
from common.checkpoint.hub import checkpoint_directory
from common.checkpoint.pooling import Pooling, asked_pooling, name_of, needs_every_token
from common.checkpoint.tokenizer_file import tokenizer_json
from common.contracts.errors import FieldViolation, InvalidConfig, Unsupported
from common.contracts.types import ANY_ARITHMETIC, KvGeometry
from common.process.cores import compute_cores
from common.process.topology import here
from common.settings.options import ModelImpl
from gpuworker.attention.backends import BackendFactory, BackendOptions, make_backend
from gpuworker.attention.interface import AttentionBackend
from gpuworker.checkpoints.lora import AdapterRefused, read_adapter
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.ports import MaskLateness, RankLoad
from gpuworker.memory.byte_plan import BytePlan, bytes_per_block, in_words
from gpuworker.memory.devices import dtype_name, pick_device
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import of_ranks, pools_of, state_group
from gpuworker.models.bit_equality import refuse_unequal_bits
from gpuworker.models.checkpoint_test import with_checkpoints
from gpuworker.models.choose import LlamaModel, Ranks, open_native, refuse_unshardable
from gpuworker.models.draft_test import refuse_wrong_states
from gpuworker.models.hf.loader import ModelSource, context_limit, load_model
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.llama.adapters import NativeAdapter
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.models.llama.gpu_model import LlamaGpuModel
from gpuworker.models.self_test import self_test
from gpuworker.models.threshold_test import beyond_thresholds, tiny_model
from gpuworker.native.library import NativeUnavailable, use_level
from gpuworker.plane.adapters import AdapterLimits, AdapterStore, ReadAdapter, UnfitAdapter
from gpuworker.plane.checkpoint_facts import CheckpointFacts, eos_token_ids
from gpuworker.plane.data_plane import DataPlane, Facts, open_disk, pool_identity, with_disk
from gpuworker.plane.draft_checks import FLAG, draft_directory, of_draft
from gpuworker.plane.memory import MemoryOptions, most_sequences, plan_draft, plan_memory
from gpuworker.plane.rank_adapters import SharedAdapters
from gpuworker.plane.rank_group import RankGroup, StartMember, rank_threads, start_group
from gpuworker.plane.rank_rendezvous import MemberProcess
from gpuworker.runner.cuda_graphs import graph_launcher
from gpuworker.runner.draft_model import DraftLimits, RunnerDraftModel
from gpuworker.runner.executor import ExecutorFactory
from gpuworker.runner.launcher import LauncherFactory, pooling_launcher
from gpuworker.runner.model_runner import ModelRunner, RunnerLimits
from gpuworker.runner.native_executor import native_executor
from gpuworker.runner.pooling import Pooler
from gpuworker.runner.rank_messages import Begin
from gpuworker.runner.thread_executor import thread_executor
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS, Speculation
from gpuworker.structured.grammars import GrammarCompiler

_log = logging.getLogger(__name__)
_MEASURED = 64  # tokens of the text on which a draft model is timed at start
Open = Callable[[ModelSource], tuple[TransformersModel | LlamaModel, KvGeometry]]


# Builds a worker's draft model: loaded and tested as the target is, with a runner and a KV cache of its own.
@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model whose weights are there, and nothing else yet."""

    model: TransformersModel | LlamaModel
    geometry: KvGeometry
    directory: Path


def load_draft(settings: GpuWorkerSettings, source: ModelSource, open_model: Open) -> LoadedDraft | None:
    """Load and test the draft model, as `open_model` does; None where the options name none.

    Raises InvalidConfig for one that cannot be served.
    """
    if settings.draft_model is None:
        return None
    directory = draft_directory(settings)
    try:
        model, geometry = open_model(replace(source, model=str(directory)))
    except InvalidConfig as error:
        raise InvalidConfig(*of_draft(error)) from error
    except Unsupported as error:
        raise InvalidConfig(FieldViolation(FLAG, f"{error}; take another one, or leave it out")) from error
    if model.states is not None:
        what = "its layers keep states, which a refused guess would have changed; take another one, or leave it out"
        raise InvalidConfig(FieldViolation(FLAG, what))
    return LoadedDraft(model, geometry, directory)


def assemble_draft(
    settings: GpuWorkerSettings,
    draft: LoadedDraft,
    target: BytePlan,
    target_vocab: int,
    options: MemoryOptions,
    backend: BackendFactory,
    executor: ExecutorFactory,
) -> RunnerDraftModel:
    """Return the draft model, timed, with memory beside that of the target. Raises InvalidConfig without such room."""
    model = draft.model
    memory = plan_draft(target, model, draft.geometry, context_limit(model.config), options)
    if isinstance(model, LlamaCpuModel):
        model.reserve(settings.max_num_batched_tokens, memory.max_num_seqs)
    cache = _cache(draft.geometry, memory)
    limits = RunnerLimits(memory.max_num_seqs, memory.max_model_len, settings.threads or 0)
    runner = ModelRunner(model, cache, backend(cache), limits, executor, eos_token_ids(draft.directory))
    store = DraftStore(memory.num_blocks, memory.block_size, memory.max_num_seqs)
    tokens = min(settings.max_num_batched_tokens, memory.max_model_len)
    made = RunnerDraftModel(
        runner, store, DraftLimits(memory.max_model_len, tokens, model.vocab_size, target_vocab), draft_words(memory)
    )
    _time(made, min(_MEASURED, memory.max_model_len // 2))
    return made


def draft_words(memory: BytePlan) -> str:
    weights, kv = in_words(memory.weights), in_words(memory.kv)
    return f"draft model: {weights} of weights, {kv} of K/V for {memory.num_blocks * memory.block_size} tokens"


def _cache(geometry: KvGeometry, memory: BytePlan) -> KvCache:
    try:
        return KvCache(geometry, memory.num_blocks, memory.block_size, torch.device("cpu"))
    except (MemoryError, OSError, RuntimeError) as error:
        what = f"{in_words(memory.kv)} for its KV cache cannot be had; lower --kv-memory, or leave it out"
        raise InvalidConfig(FieldViolation(FLAG, what)) from error


def _time(draft: RunnerDraftModel, tokens: int) -> None:
    """Measure the draft model's steps, the second time: the first one touches memory for the first time."""
    for _ in range(2):
        draft.forget_prices()
        drafter = draft.new_drafter([0] * tokens, Speculation())
        draft.guess([(drafter, 4)])
        draft.release(drafter)
    if draft.failure is not None:
        raise InvalidConfig(FieldViolation(FLAG, f"its first step failed: {draft.failure}")) from draft.failure
    _log.info("%s", draft.in_words())


# Refuses --speculative where verified drafts could change tokens, or where none is sampled.
def refuse_unequal_drafts(kind: str, model: TransformersModel | LlamaModel, pooling: Pooling | None) -> None:
    """Raise InvalidConfig unless the tokens of a step with drafts are those of steps without."""
    why = _why_not(model, pooling)
    if why:
        raise InvalidConfig(FieldViolation("--speculative", f"is {kind}, and {why}; leave it out"))


def _check_drafts(
    settings: GpuWorkerSettings,
    model: TransformersModel | LlamaModel,
    geometry: KvGeometry,
    pooling: Pooling | None,
    backend: BackendFactory,
) -> None:
    if settings.speculation == "none":
        return
    refuse_unequal_drafts(settings.speculation, model, pooling)
    if isinstance(model, TransformersModel):
        refuse_wrong_states(model, backend, geometry)


def _why_not(model: TransformersModel | LlamaModel, pooling: Pooling | None) -> str:
    if pooling is not None:
        return "the workers embed prompts: no token is sampled that could be guessed"
    if model.states is not None and not isinstance(model, TransformersModel):
        return "its layers keep states, of which the native path keeps none for drafts; use --model-impl transformers"
    if model.device.type != "cpu":
        return f"the device is {model.device}, on which drafts have never been verified; use --device cpu"
    if isinstance(model, LlamaCpuModel) or model.dtype == torch.float32:
        return ""
    return (
        f"the model runs on transformers' code in {dtype_name(model.dtype)}, where a step of more rows rounds "
        "otherwise and could sample other tokens; use --dtype float32"
    )


_MAX_NUM_SEQS = {"cuda": 256}
_MAX_NUM_SEQS_ELSEWHERE = 64
_MOST_CHARACTERS = 200  # of an error of torch
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelPlane(DataPlane):
    """A data plane that runs a model."""

    model: TransformersModel | LlamaModel
    runner: ModelRunner
    draft: RunnerDraftModel | None = None
    ranks: RankGroup | None = None
    adapters: AdapterStore | None = None
    adapter_bytes: int = 0

    @property
    def draft_model(self) -> RunnerDraftModel | None:
        return self.draft

    @property
    def keeps_states(self) -> bool:
        return self.model.states is not None and state_group(self.memory.groups) is None

    def start_lines(self) -> list[str]:
        # Named: a dataclass with slots is another class than the one that `super()` knows.
        draft = [] if self.draft is None else [self.draft.in_words()]
        return [*DataPlane.start_lines(self), *draft, *self._adapter_lines()]

    @property
    def served_adapters(self) -> AdapterStore | None:
        return self.adapters

    def _adapter_lines(self) -> list[str]:
        if not self.settings.most_loras:
            return []
        rank, bytes_of_all = self.settings.max_lora_rank, in_words(self.adapter_bytes)
        return [f"adapters: {self.settings.most_loras} of rank {rank} in memory at once, {bytes_of_all} reserved"]

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self.runner.grammars

    def report_lost_rank(self, to: Callable[[str], None]) -> None:
        if self.ranks is not None:
            self.ranks.serve(to)

    def rank_load(self) -> RankLoad:
        if self.ranks is None:
            return RankLoad()
        times = self.ranks.links.times
        return RankLoad(self.ranks.size, times.plans, times.seconds, self.ranks.lost)

    def mask_lateness(self) -> MaskLateness:
        return self.runner.mask_lateness


def assemble(settings: GpuWorkerSettings, start_member: StartMember = MemberProcess.start) -> ModelPlane:
    """Load the model, test it, size the KV cache and allocate it. With several ranks `start_member` starts the others.

    Raises InvalidConfig when options do not fit the checkpoint or the memory, Unsupported for a model that cannot be
    served.
    """
    device = pick_device(settings.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    torch.set_num_threads(rank_threads(settings))
    _use_level(settings.cpu_level)
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    pooling = asked_pooling(settings.pooling, directory)
    source = source_of(settings)
    group = None
    if settings.tensor_parallel_size > 1:
        refuse_unshardable(source, device, settings.tensor_parallel_size)
        group = start_group(settings, start_member)
    try:
        return _assemble(settings, source, pooling, directory, device, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def source_of(settings: GpuWorkerSettings) -> ModelSource:
    """Return what is loaded, and how, as the options say."""
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    return ModelSource(
        model=str(directory),
        dtype=settings.dtype,
        load_format=settings.load_format,
        seed=settings.seed,
        kv_cache_dtype=settings.kv_cache_dtype,
        quantization=settings.quantization,
        pooled=asked_pooling(settings.pooling, directory) is not None,
    )


def asks_for_checkpoints(settings: GpuWorkerSettings) -> bool:
    """Return whether states are to leave checkpoints, where layers keep some."""
    directory = checkpoint_directory(settings.model, revision=settings.revision)
    return settings.prefix_caching and asked_pooling(settings.pooling, directory) is None


def _assemble(
    settings: GpuWorkerSettings,
    source: ModelSource,
    pooling: Pooling | None,
    directory: Path,
    device: torch.device,
    group: RankGroup | None,
) -> ModelPlane:
    """Do what `assemble` does, at rank 0 of the group if there is one."""
    options = BackendOptions(deterministic=settings.deterministic)
    backend = partial(make_backend, "auto", options=options)
    in_graphs = settings.cuda_graphs and device.type == "cuda"
    checkpoints, ranks = asks_for_checkpoints(settings), None if group is None else group.ranks
    layers = _Layers(settings.block_size, in_graphs, checkpoints)
    model, own_geometry = _open(source, device, settings.model_impl, backend, layers, ranks)
    if group is not None:
        group.await_loaded()
    geometry = of_ranks(own_geometry, settings.tensor_parallel_size)
    _check_drafts(settings, model, geometry, pooling, backend)
    adapter_bytes = allow_adapters(settings, model)
    _tell_of_windows(model, geometry, in_graphs)
    draft = load_draft(settings, source, lambda of: _open(of, device, settings.model_impl, backend))
    arithmetic = _fixed_arithmetic(model, geometry, backend) if settings.deterministic else ANY_ARITHMETIC
    usual = _MAX_NUM_SEQS.get(device.type, _MAX_NUM_SEQS_ELSEWHERE)
    max_num_seqs = settings.num_seqs(most_sequences(model, usual, _drafts(settings)))
    limit = _usable_positions(model)
    of_memory = _memory_options(settings, max_num_seqs, pooling, adapter_bytes)
    usual_len = CheckpointFacts(directory).usual_len(settings.tokenizer or directory)
    options_of_memory = replace(of_memory, usual_len=usual_len)
    memory = plan_memory(model, geometry, limit, options_of_memory)
    if isinstance(model, LlamaCpuModel) and pooling is None:
        model.reserve(settings.max_num_batched_tokens, max_num_seqs + _drafts(settings))
    cache = allocated_cache(own_geometry, memory, device)
    cache.frames = _allocated_frames(cache, memory)
    _reserve_states(model, memory)
    _begin_ranks(group, settings, memory)
    limits = RunnerLimits(max_num_seqs, memory.max_model_len, rank_threads(settings))
    eos = eos_token_ids(directory, settings.tokenizer)
    identity = pool_identity(settings, directory, geometry, arithmetic, pooling)
    attention = backend(cache)
    if pooling is None:
        executor = executor_for(model, _launcher(settings, model, cache, attention, limits), group)
        runner = ModelRunner(model, cache, attention, limits, executor, eos)
        grammars = GrammarCompiler(_tokenizer_json(settings.tokenizer or directory), model.vocab_size, eos)
        runner.constrain(grammars, foresee=settings.speculation != "none")
    else:
        executor = executor_for(model, pooling_launcher(model, attention), group)
        runner = ModelRunner(model, cache, attention, limits, executor, eos, Pooler(pooling))
    if group is not None:
        runner.also_closed.append(group.close)
    drafting = None
    if draft is not None:
        vocab, factory = model.vocab_size, executor_for(draft.model)
        drafting = assemble_draft(settings, draft, memory, vocab, options_of_memory, backend, factory)
        runner.also_closed.append(drafting.close)
    facts = _facts(settings, model, eos)
    disk = open_disk(settings, settings.disk_cache_bytes, memory.frame_bytes, identity, facts)
    return ModelPlane(
        settings,
        identity,
        with_disk(memory, disk),
        runner,
        max_num_seqs,
        facts,
        model,
        drafting,
        ranks=group,
        adapters=open_adapters(settings, model, None if group is None else SharedAdapters(group.links)),
        adapter_bytes=adapter_bytes,
        images=cache.frames,
        disk=disk,
    )


# The adapters of a worker: what they may change of its model, and the memory that is reserved for them.
def allow_adapters(settings: GpuWorkerSettings, model: TransformersModel | LlamaModel) -> int:
    """Prepare a model for adapters where the options ask for them; return the bytes to reserve, one more than it holds.

    Raises InvalidConfig for a model that takes none.
    """
    if not settings.most_loras:
        return 0
    flag = "--lora" if settings.lora else "--lora-dir"
    if not model.adapter_targets:
        raise InvalidConfig(FieldViolation(flag, "adapts linears, and this model has none that can be; leave it out"))
    model.allow_adapters(settings.max_lora_rank)
    numbers = sum(outputs + inputs for outputs, inputs in model.adapter_targets.values())
    of_ranks = settings.tensor_parallel_size  # each has at most the whole: one of the factors is at all of them
    return (settings.most_loras + 1) * settings.max_lora_rank * numbers * _FLOAT_BYTES * of_ranks


def open_adapters(
    settings: GpuWorkerSettings, model: TransformersModel | LlamaModel, shared: SharedAdapters | None = None
) -> AdapterStore | None:
    """Return the worker's adapters, those of the options read, at all ranks where they are `shared`.

    Raises InvalidConfig with all that are unfit.
    """
    if not settings.most_loras:
        return None
    targets, base = model.adapter_targets, served_name(Path(settings.model))

    def read(folder: Path) -> ReadAdapter:
        try:
            found = read_adapter(folder, targets, settings.max_lora_rank)
        except AdapterRefused as refused:
            raise UnfitAdapter(str(refused)) from None
        if found.base and Path(found.base).name != base:
            _log.warning("the adapter in %s names base %s, and %s is served: its shapes fit", folder, found.base, base)
        prepared = model.prepare_adapter(found)
        if shared is not None:
            assert isinstance(prepared, NativeAdapter), "ranks run the native path"
            shared.share(folder, found.fingerprint, prepared)
        return ReadAdapter(found.fingerprint, found.rank, prepared.num_bytes, prepared)

    if base in (value.partition("=")[0] for value in settings.lora):
        raise InvalidConfig(FieldViolation("--lora", f"names an adapter {base}, as the model is called; rename it"))
    root = None if settings.lora_dir is None else settings.lora_dir.expanduser().resolve()
    store = AdapterStore(read, AdapterLimits(settings.most_loras, root), lambda: torch.set_num_threads(1))
    pairs = (value.partition("=") for value in settings.lora)
    store.load_at_start((name, Path(folder).expanduser()) for name, _, folder in pairs)
    return store


def _usable_positions(model: TransformersModel | LlamaModel) -> int:
    """Return how many positions the model runs, and say where they are fewer than its configuration has."""
    limit, positions = context_limit(model.config), getattr(model.config, "max_position_embeddings", None) or 0
    if limit < positions:
        _log.warning("longrope: running up to its original length of %d positions, not %d", limit, positions)
    return limit


def _use_level(level: str) -> None:
    try:
        use_level(level)
    except NativeUnavailable as reason:
        raise InvalidConfig(FieldViolation("--cpu-level", f"{reason}; or leave it at auto")) from reason


def allocated_cache(geometry: KvGeometry, memory: BytePlan, device: torch.device) -> KvCache:
    """Return the KV cache. Raises InvalidConfig when the system does not give its memory."""
    try:
        return KvCache(geometry, memory.num_blocks, memory.block_size, device)
    except (MemoryError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:_MOST_CHARACTERS]
        what = f"{in_words(memory.kv)} for the KV cache cannot be had on {device}: {first}; ask for less"
        raise InvalidConfig(FieldViolation("--kv-memory", what)) from error


def _allocated_frames(cache: KvCache, memory: BytePlan) -> HostFrames | None:
    """Return the frames of the host tier; None without one. Raises InvalidConfig when memory cannot be had."""
    if not memory.host_frames:
        return None
    try:
        frames = HostFrames(cache.pools, memory.frame_bytes, memory.host_frames)
    except (MemoryError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:_MOST_CHARACTERS]
        what = f"{in_words(memory.host)} of the host's memory cannot be had: {first}; ask for less"
        raise InvalidConfig(FieldViolation("--host-memory", what)) from error
    frames.warm()
    return frames


def _reserve_states(model: TransformersModel | LlamaModel, memory: BytePlan) -> None:
    if model.states is None:
        return
    try:
        model.states.reserve(memory.max_num_seqs, memory.drafted_states)
    except (MemoryError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:_MOST_CHARACTERS]
        what = f"{in_words(memory.states)} for states cannot be had on {memory.device}: {first}; lower it"
        raise InvalidConfig(FieldViolation("--max-num-seqs", what)) from error


def _tokenizer_json(directory: Path) -> Path:
    """Return the tokenizer of constraints; without one, requests with a constraint are refused."""
    own = directory / "tokenizer.json"
    try:
        return tokenizer_json(directory) or own
    except InvalidConfig as error:
        if own.is_file():
            raise
        _log.warning("no constraints can be followed: %s", error)
        return own


def _facts(settings: GpuWorkerSettings, model: TransformersModel | LlamaModel, eos: tuple[int, ...]) -> Facts:
    device = model.device
    words = str(device)
    if device.type == "cpu":
        words = _cpu_words(rank_threads(settings), compute_cores(here()))
        if settings.tensor_parallel_size > 1:
            words = f"{settings.tensor_parallel_size} ranks, each {words}"
    software = f"torch {torch.__version__}"
    states = "" if model.states is None else model.states.layout
    return Facts(model.vocab_size, eos, dtype_name(model.dtype), str(device), words, software, states)


def _cpu_words(threads: int, cores: int) -> str:
    of = f"{threads} {'thread' if threads == 1 else 'threads'} of {cores} {'core' if cores == 1 else 'cores'}"
    return f"cpu with {of}"


def _begin_ranks(group: RankGroup | None, settings: GpuWorkerSettings, memory: BytePlan) -> None:
    """Let the other ranks allocate what this one has allocated, where there are some."""
    if group is not None:
        kept, tokens = memory.max_num_seqs + _drafts(settings), settings.max_num_batched_tokens
        group.begin(Begin(memory.num_blocks, memory.max_num_seqs, memory.max_model_len + 1, tokens, kept))


@dataclass(frozen=True, slots=True)
class _Layers:
    """How the layers of a model may keep K, V and states: see `_open`."""

    block_size: int = 0
    in_graphs: bool = False
    checkpoints: bool = False


_ONE_GROUP = _Layers()


def _open(
    source: ModelSource,
    device: torch.device,
    model_impl: ModelImpl,
    backend: BackendFactory,
    layers: _Layers = _ONE_GROUP,
    ranks: Ranks | None = None,
) -> tuple[TransformersModel | LlamaModel, KvGeometry]:
    """Return the model, tested, on the path that it can take, and the shape of its K/V.

    Its layers may be groups where a block size is given; not those of a model that is to run in CUDA graphs. With
    `checkpoints` its states have pages.
    """
    block_size, checkpoints = layers.block_size, layers.checkpoints
    native_size = 0 if layers.in_graphs else block_size
    native = open_native(source, device, model_impl, backend, native_size, checkpoints, ranks)
    if native is not None:
        return native
    model = load_model(source, device)
    geometry = self_test(model, backend, block_size=block_size)
    if model.states is not None and model.states.token_by_token:
        _log.warning("%s: chunks of a prompt after the first go token by token", model.config.model_type)
    beyond_thresholds(
        model.config,
        lambda tiny, length: self_test(tiny_model(tiny, device), backend, length=length, block_size=block_size),
    )
    if checkpoints:
        geometry = with_checkpoints(model, backend, geometry, block_size)
    return model, geometry


def _tell_of_windows(model: TransformersModel | LlamaModel, geometry: KvGeometry, in_graphs: bool) -> None:
    """Say what it costs that layers with a window, or with chunks, keep K/V as long as the others."""
    why = ", because CUDA graphs know one table of blocks" if in_graphs and isinstance(model, LlamaGpuModel) else ""
    kinds = getattr(model.config, "layer_types", None) or ()
    for kind, words, size in (
        ("sliding_attention", "have a window of", "sliding_window"),
        ("chunked_attention", "attend in chunks of", "attention_chunk_size"),
    ):
        layers = {layer for layer, its_kind in enumerate(kinds) if its_kind == kind}
        counts = [(pool.geometry, len(layers.intersection(pool.layers))) for pool in pools_of(geometry)]
        if geometry.window or geometry.groups or not any(count for _, count in counts):
            continue
        kept = sum(bytes_per_block(replace(shape, num_layers=count), 1) for shape, count in counts)
        _log.info(
            "%d of %d layers %s %s tokens and keep K/V of the whole context: %s of %s a token%s",
            sum(count for _, count in counts),
            geometry.num_layers,
            words,
            getattr(model.config, size, None),
            in_words(kept),
            in_words(bytes_per_block(geometry, 1)),
            why,
        )


def executor_for(
    model: TransformersModel | LlamaModel, launcher: LauncherFactory | None = None, group: RankGroup | None = None
) -> ExecutorFactory:
    """Return the factory of the executor with the least work between two steps of a model."""
    if not isinstance(model, LlamaCpuModel):
        return thread_executor(launcher)
    return native_executor if group is None else partial(native_executor, links=group.links)


def _launcher(
    settings: GpuWorkerSettings,
    model: TransformersModel | LlamaModel,
    cache: KvCache,
    attention: AttentionBackend,
    limits: RunnerLimits,
) -> LauncherFactory | None:
    """Return the factory of a launcher of CUDA graphs; None where steps are launched kernel by kernel."""
    if not settings.cuda_graphs or not isinstance(model, LlamaGpuModel) or model.device.type != "cuda":
        return None
    return graph_launcher(model, cache, attention, limits.max_num_seqs, limits.max_model_len)


def _fixed_arithmetic(model: TransformersModel | LlamaModel, geometry: KvGeometry, backend: BackendFactory) -> str:
    """Return what decides the bits of the model's logits. Raises Unsupported where other parts of a step do too."""
    if model.arithmetic is None:
        raise Unsupported(
            f"--deterministic cannot be kept: this {model.config.model_type} is not run by the native CPU path, and the"
            " bits of other products of matrices depend on how many rows they have"
        )
    refuse_unequal_bits(model, replace(geometry, groups=()), backend)  # where blocks lie changes no bits
    _log.info("deterministic, like every worker of this arithmetic: %s", model.arithmetic)
    return model.arithmetic


def _drafts(settings: GpuWorkerSettings) -> int:
    """Return how many drafts a step has at most."""
    return 0 if settings.speculation == "none" else MAX_STEP_DRAFTS


def _memory_options(
    settings: GpuWorkerSettings, max_num_seqs: int, pooling: Pooling | None, adapter_bytes: int
) -> MemoryOptions:
    every = needs_every_token(name_of(pooling))
    pooled = 0 if pooling is None else settings.max_num_batched_tokens if every else max_num_seqs
    return MemoryOptions(
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        kv_memory=settings.kv_memory,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        cuda_graphs=settings.cuda_graphs and pooling is None,
        drafts=_drafts(settings),
        pooled_tokens=pooled,
        adapter_bytes=adapter_bytes,
        host_memory=settings.host_memory or 0,
        disk_cache=settings.disk_cache is not None,
        ranks=settings.tensor_parallel_size,
        needs_peers=settings.needs_peers,
    )
