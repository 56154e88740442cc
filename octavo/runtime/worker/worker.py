"""A `Worker` is one rank: it owns the device's share of the model and of the KV cache.

Started by an executor, in the engine's process or in one of its own (worker/main). Runs on one thread.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from octavo.base.errors import OctavoError, Unsupported
from octavo.config.engine import EngineConfig
from octavo.config.expert_load import expert_load
from octavo.config.snapshot import check_machine
from octavo.messages.adapters import AdapterRef
from octavo.messages.control import obey
from octavo.messages.kv import CachePlan, ModelReady
from octavo.messages.request import RequestSpec
from octavo.messages.step import SchedulerOutput, TokenMasks
from octavo.runtime.distributed.group import ONE
from octavo.runtime.distributed.peer_setup import join_ranks
from octavo.runtime.heads.pool import PoolHead
from octavo.runtime.heads.stage import LastHead, StageHead
from octavo.runtime.heads.token import TokenHead
from octavo.runtime.layers.build import packed_matrices
from octavo.runtime.loader.loader import Reader, load_model
from octavo.runtime.loader.snapshot import save_snapshot
from octavo.runtime.lora.pool import AdapterPool
from octavo.runtime.models.interface import Model
from octavo.runtime.platforms.platform import Capture, get_platform
from octavo.runtime.sampling.request_functions import load_processors
from octavo.runtime.sampling.sampler import Sampler, with_users
from octavo.runtime.speculative.drafter import Drafter
from octavo.runtime.speculative.load import load_drafter, rejection_of
from octavo.runtime.speculative.part import DraftPart
from octavo.runtime.weight_transfer.receiver import WeightReceiver
from octavo.runtime.worker.adapters import AdaptersPart
from octavo.runtime.worker.block_saver import BlockSaver
from octavo.runtime.worker.cuda_graphs import CUDAGraphs
from octavo.runtime.worker.expert_balancer import ExpertBalancer
from octavo.runtime.worker.host_copy import HostCopy
from octavo.runtime.worker.hot_experts import HotExperts
from octavo.runtime.worker.kv_scale_run import measure_kv_scales
from octavo.runtime.worker.kv_tensors import KVTensors, make_cache
from octavo.runtime.worker.lockstep import make_lockstep
from octavo.runtime.worker.media import MediaPart
from octavo.runtime.worker.model_runner import ModelRunner
from octavo.runtime.worker.pending import PendingStep
from octavo.runtime.worker.profile_run import cache_groups, measure
from octavo.runtime.worker.profiler import Profiler
from octavo.runtime.worker.prompt_embeds import PromptEmbedsPart
from octavo.runtime.worker.prompt_scores import PromptScores
from octavo.runtime.worker.recorded_calls import RecordedCalls
from octavo.runtime.worker.recorded_encoder import RecordedEncoder
from octavo.runtime.worker.replayer import Eager, Replayer, one_variant
from octavo.runtime.worker.request_state import RequestState
from octavo.runtime.worker.routed_experts import RoutedExpertsPart, attach
from octavo.runtime.worker.soft_prompts import SoftPromptsPart, make_soft_prompts
from octavo.runtime.worker.source import SourcePart
from octavo.runtime.worker.staged_weights import StagedWeights
from octavo.runtime.worker.step_part import StepPart


class Worker:
    """Loads, allocates, then executes steps in the order given."""

    def __init__(self, config: EngineConfig, rank: int = 0, init_method: str = "") -> None:
        self._config, asked = config, config.parallel
        snapshot = Path(config.checkpoint.path) if config.checkpoint.is_snapshot else None
        platform = self._platform = get_platform(asked.device, asked.cpu_threads, snapshot)
        if snapshot is not None:
            check_machine(snapshot, platform.machine)
        device, kernels, capture = platform.device, platform.kernels.peers, platform.graph_capture()
        self._parallel = join_ranks(asked, rank, init_method, device, kernels, capture)
        self._profiler = Profiler(config.observability.profiler_dir, rank)
        self._drafts: DraftPart | None = None
        self._adapters: AdaptersPart | None = None
        self._routed: RoutedExpertsPart | None = None
        self._soft_prompts: SoftPromptsPart | None = None
        self._media: MediaPart | None = None
        self._lockstep = make_lockstep(self._parallel, config, self._platform, lambda: self.model)
        self.idle = self._lockstep.idle if self._lockstep else None
        self._host_copy = HostCopy(device)
        self._staged = StagedWeights(self._load)
        keeps = self._parallel.world.is_first
        self._receiver = WeightReceiver(device, self._load, self._staged.put, keeps=keeps)
        self._commands: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "drop_saves": self.drop_saves,
            "drop_staged_weights": self.drop_staged_weights,
            "reset_encoder_cache": self.reset_encoder_cache,
            "save_snapshot": lambda folder: save_snapshot(
                Path(folder), self.model, self._config, self._platform, self._parallel.world.rank
            ),
            "sleep": self.sleep,
            "stage_weights": lambda path: self._staged.stage(self._config, path),
            "start_profile": self._profiler.start,
            "start_weight_update": lambda: self._receiver.start(self._config),
            "stop_profile": self._profiler.stop,
            "use_staged_weights": self.use_staged_weights,
            "wake_up": self.wake_up,
            **self._receiver.commands,
            "init_weight_transfer_engine": lambda init_info: self._receiver.init(init_info, self._config),
        }

    def load(self) -> ModelReady:
        """Load the model; returns the cache groups and the bytes left for them."""
        self._users_processors = load_processors(self._config)
        self._load_weights()
        if self._lockstep is not None:
            self._lockstep.measure()
        groups = self._groups = cache_groups(self.model, self._drafter, self._config.cache.block_size)
        self._has_tried = self._platform.compile_ahead(self._try_out, is_alone=self._parallel.is_alone)
        if not self._has_tried:
            self._workspace = measure(self.model, self._config, self._platform)
        own_bytes = self._platform.available_memory_bytes(self._config.cache.gpu_memory_utilization)
        available = self._parallel.world.least(own_bytes - sum(self._workspace), self._platform.device)
        weights = self.model.weight_bytes + (self._drafter.weight_bytes if self._drafter else 0)
        return ModelReady(groups, available, weights, sum(self._workspace), self.model.host_weight_bytes)

    def _load_weights(self) -> None:
        self._model: Model | None
        self._drafter: Drafter | None
        self._model, self._drafter = self._load(self._config)

    def _load(self, config: EngineConfig, read: Reader | None = None) -> tuple[Model, Drafter | None]:
        model = load_model(config, self._platform, self._parallel, read)
        measure_kv_scales(model, config, self._platform)
        return model, load_drafter(config, model, self._platform, self._parallel)

    def _try_out(self) -> None:
        """Compute what is computed before the first requests, and for them; over a cache of one block."""
        self._workspace = measure(self.model, self._config, self._platform)
        if self.model.is_recordable and not self._config.pooling:
            plan = CachePlan(groups=self._groups, num_blocks=1, block_size=self._config.cache.block_size)
            runner = self._make_runner(plan)
            self._make_graphs(runner, self.model, runner.cache, runner.state, lambda work: work).try_out()

    def allocate(self, plan: CachePlan) -> None:
        """Allocate this rank's part of the planned cache, and the batch state."""
        plan = msgspec.structs.replace(plan, groups=self._groups)
        self._runner = self._make_runner(plan)
        self._cache, store, rank = self._runner.cache, plan.store, self._parallel.world.rank
        self._saver = BlockSaver(store, self._cache, rank) if store and store.writes else None
        self._equip()
        self._runner.warm_up(has_tried=self._has_tried)
        self._commands["use_pause"] = self._runner.use_pause

    def _make_runner(self, plan: CachePlan) -> ModelRunner:
        config, device = self._config, self._platform.device
        num_rows = config.scheduler.max_num_rows
        longest = plan.max_model_len or config.model.max_model_len
        state = RequestState(num_rows, longest, plan, device)
        adapters: list[StepPart] = [part] if (part := self._make_adapters(num_rows)) else []
        media = self._make_media(state, part)
        soft = self._soft_prompts = make_soft_prompts(config, self.model, self._platform, self._parallel)
        if soft is not None:
            self._commands["load_soft_prompt"] = soft.pool.load
        if (load := expert_load(config.parallel)) is not None:
            adapters.append(ExpertBalancer(load, self._parallel.ep, lambda: self.model, self._lockstep))
        hot = HotExperts(lambda: self.model) if config.parallel.cpu_offload_experts else None
        adapters += filter(None, (soft, hot, self._lockstep))
        if config.pooling is not None:
            parts: list[StepPart] = [*media, *adapters]
            return ModelRunner(make_cache(plan, device), state, PoolHead(config.pooling, state), parts)
        tokens = self._parallel.tokens
        if not tokens.is_last:
            parts = [PromptEmbedsPart(device), *media, *adapters]
            return ModelRunner(make_cache(plan, device), state, StageHead(state, tokens), parts)
        sampler = Sampler(
            config.checkpoint.vocab_size,
            num_rows,
            device,
            self._platform.kernels.sampling,
            config.model.logprobs_mode,
            with_users(self._users_processors),
        )
        scores = PromptScores(config.model.logprobs_mode, state)
        if part is not None:
            scores.fix = part.fix
        parts = [PromptEmbedsPart(device), *media, scores, *adapters]
        if config.scheduler.speculative_config:
            sampler.rejection = rejection_of(config.scheduler.speculative_config)
            self._drafts = DraftPart(state, sampler)
            self._drafts.others = parts.copy()
            parts.append(self._drafts)
        head = TokenHead(sampler, state) if tokens.size == 1 else LastHead(sampler, state, tokens)
        cache = make_cache(plan, device)
        self._routed = attach(self.model, state, cache, plan, config) if self._parallel.tp_rank == 0 else None
        parts += [self._routed] if self._routed else []
        return ModelRunner(cache, state, head, parts)

    def _make_media(self, state: RequestState, adapters: AdaptersPart | None) -> list[MediaPart]:
        """Return what encodes images and the like, if the model takes some."""
        if self.model.media_encoder is None:
            return []
        media, parallel = self._config.media, self._parallel
        most = int(media.mm_encoder_cache_gb * 2**30)
        if self.model.cross_layers:
            heads = self._config.checkpoint.generation_config.get("alignment_heads") or []
            self._media = SourcePart(lambda: self.model, state, most, heads, parallel.tp)
        else:
            ranks = parallel.tp if media.mm_encoder_tp_mode == "data" else ONE
            is_eager = parallel.world.size > 1 or self._config.parallel.enforce_eager
            capture = None if is_eager else self._platform.graph_capture()
            place: dict[str, Any] = {"embeds": parallel.pp.is_first, "ranks": ranks, "capture": capture}
            self._media = MediaPart(lambda: self.model.media_encoder, state, most, **place)
        self._media.adapters = adapters
        return [self._media]

    def _make_adapters(self, num_rows: int) -> AdaptersPart | None:
        """Return what gives requests their adapters, if there may be some. Raises Unsupported."""
        if not self._config.lora.enable_lora:
            return None
        reader = self.model.adapters
        if reader is None:
            raise Unsupported(f"enable_lora: {self._config.architecture} runs on transformers' code.")
        pool = AdapterPool(AdapterRef, reader.read, self._config.lora.max_cpu_loras)
        self._commands |= pool.commands
        self._adapters = AdaptersPart(pool, reader.sites, self._parallel, num_rows)
        return self._adapters

    def _equip(self) -> None:
        runner = self._runner
        runner.strip()
        if (experts := self.model.expert_cache) is not None:
            experts.place()
        if self._adapters is not None:
            self._adapters.equip(self.model.adapters.sites)
        if self._routed is not None:
            self._routed.equip(self.model)
        runner.equip(replayer := self._make_replayer(self.model, runner.cache, runner.state))
        if self._drafts is not None:
            self._drafts.equip(self._drafter, runner.cache, replayer, self._make_replayer)

    def _make_replayer(self, model: Model, cache: KVTensors, state: RequestState) -> Replayer:
        runner, platform, samples = self._runner, self._platform, self._config.pooling is None
        if model.is_recordable and not self._config.parallel.enforce_eager:
            if samples and (capture := platform.graph_capture()) is not None:
                return self._make_graphs(runner, model, cache, state, capture)
            record, is_plain = platform.kernels.steps.record_calls, model.adapters is None
            parallel = self._parallel if model is self._model else self._parallel.as_one_stage()
            if record is not None and parallel.is_recordable:
                if samples:
                    variant = one_variant if is_plain else model.adapters.sites.slots.recording
                    return RecordedCalls(model, cache, state, record, variant, parallel)
                if parallel.is_alone and is_plain and not self._groups and model.media_encoder is None:
                    return RecordedEncoder(model, cache, state, record)
        return Eager(model, cache, state, batch_invariant=platform.is_batch_invariant)

    def _make_graphs(
        self, runner: ModelRunner, model: Model, cache: KVTensors, state: RequestState, capture: Capture
    ) -> CUDAGraphs:
        return CUDAGraphs(
            model,
            cache,
            state,
            runner.head.sampler if isinstance(runner.head, TokenHead) else None,
            self._platform.kernels.steps,
            capture,
            batch_invariant=self._platform.is_batch_invariant,
            parallel=self._parallel if model is self._model else self._parallel.as_one_stage(),
        )

    def execute(self, step: SchedulerOutput) -> PendingStep:
        """Give one step to the device."""
        if self._profiler.is_on:
            self._profiler.before_step()
        if step.block_contents:
            rank = self._parallel.world.rank
            self._cache.bring({block: parts[rank] for block, parts in step.block_contents.items()})
        pending = self._runner.execute(step)
        if step.block_saves and self._saver is not None:
            self._saver.save(step.block_saves)
        return pending

    def drop_saves(self) -> None:
        """Forget the blocks that wait to be written for other engines."""
        if self._saver is not None:
            self._saver.drop()

    def reset_encoder_cache(self) -> None:
        """Forget what the encoder made of images."""
        if self._media is not None:
            self._media.cache.clear()

    def sample(self, masks: TokenMasks) -> None:
        """Give the sampling of the last step to the device, whose masks had to follow."""
        self._runner.sample(masks)

    def call(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Answer a control verb. Raises Unsupported for an unknown one, RequestError for wrong arguments."""
        return obey(self._commands, verb, arguments)

    @property
    def model(self) -> Model:
        """Return the loaded model."""
        assert self._model is not None and self._has_weights, "the weights have been given up"
        return self._model

    @property
    def _has_weights(self) -> bool:
        return self._model is not None and not self._host_copy.is_away

    def sleep(self, parts: list[str], *, discard_weights: bool = False) -> None:
        """Give up memory until `wake_up`: of the KV cache, of the weights.

        Weights that the CPU computes with are in host memory already: they stay, unless they are discarded. A
        GPU's are copied there, if it has room; else they will be read from the checkpoint again.
        """
        self._runner.strip()
        if "kv_cache" in parts:
            self._cache.free()
        if "weights" in parts and (discard_weights or self._platform.device.type != "cpu"):
            if self._drafts is not None:
                self._drafts.strip()
            if discard_weights or not self._host_copy.give_up(self.model, self._drafter):
                self._model = self._drafter = None
                self._host_copy.forget()
        _free_unused()

    def wake_up(self, parts: list[str]) -> bool:
        """Take the memory of these parts back; return whether weights were read from files for that."""
        reads = "weights" in parts and self._model is None
        if reads:
            self._load_weights()
        elif "weights" in parts and self._host_copy.is_away:
            self._host_copy.bring_back()
        if "kv_cache" in parts:
            self._cache.allocate()
        self._equip_if_awake()
        return reads

    def _equip_if_awake(self) -> None:
        if self._has_weights and (self._cache.num_bytes or not self.model.cache_layers):
            self._equip()

    def drop_staged_weights(self) -> None:
        """Forget an update of weights."""
        self._receiver.drop()
        self._staged.drop()

    def use_staged_weights(self) -> str:
        """Compute with the weights that wait, while no step is in flight. Return their files' path, or ""."""
        self._runner.strip()
        self._host_copy.forget()
        self._config, self._model, self._drafter, path = self._staged.take()
        self._receiver.note_use()
        self._equip_if_awake()
        _free_unused()
        return path

    def describe(self) -> dict[str, Any]:
        """Return what this rank holds, as plain types."""
        parts = (self.model, self._drafter) if self._has_weights else ()
        return {
            "device": str(self._platform.device),
            "kernels": self._platform.kernels.name,
            "tp_rank": self._parallel.tp_rank,
            "pp_rank": self._parallel.pp.rank,
            "weight_bytes": sum(part.weight_bytes for part in parts if part),
            "host_weight_bytes": self.model.host_weight_bytes if parts else 0,
            "kv_cache_bytes": self._cache.num_bytes,
            "packed_matrices": {} if self._model is None else packed_matrices(self._model),
        }

    def takes_time(self, spec: RequestSpec) -> bool:
        """Return True if `prepare` has something to read."""
        adapter, part = spec.adapter, self._adapters
        if adapter is not None and part is not None and not part.pool.has(adapter.key):
            return True
        prompt, prompts = spec.soft_prompt, self._soft_prompts
        return prompt is not None and prompts is not None and not prompts.pool.has(prompt.key)

    def prepare(self, spec: RequestSpec) -> None:
        """Read what a request will need, on a thread of the caller's; what fails, fails again in its step."""
        with suppress(OctavoError):
            if spec.adapter is not None and self._adapters is not None:
                self._adapters.pool.get(spec.adapter)
            if spec.soft_prompt is not None and self._soft_prompts is not None:
                self._soft_prompts.pool.get(spec.soft_prompt)

    def close(self) -> None:
        """Give the device's memory back, and leave the process group."""
        if saver := self.__dict__.get("_saver"):
            saver.close()
        device, parallel = self._platform.device, self._parallel
        self.__dict__.clear()  # whoever keeps the worker keeps no part of it
        if device.type != "cpu":
            _free_unused()
        parallel.close()  # NCCL waits for the graphs that it is in


def _free_unused() -> None:
    gc.collect()  # modules and their children refer to each other
    torch.cuda.empty_cache()
