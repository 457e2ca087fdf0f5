"""The rollout engine `vllm`: a vLLM engine on the trainer's weights.

The model runs in this process, in vLLM's worker processes, or over the trainer's ranks. This file
keeps the policy version and the order of calls; `engine_launch` starts vLLM, `engine_weights`
brings weights, `llm_requests` sends requests. On a device shared with a trainer, weights and KV
cache must not be allocated while the trainer's memory is at its peak, so `SleepMode` knows one
order:

    serving --sleep--> asleep --wake_weights--> weights --(update)--> weights --wake_kv--> serving

Importing this does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout import protocol
from engine.rollout.stream import KvOnUpdate
from engine.rollout.vllm import engine_launch, weight_load
from engine.rollout.vllm.engine_weights import EngineWeights, InProcessWeights, WorkerWeights
from engine.rollout.vllm.llm_requests import LLMRequests, VllmFailed
from engine.rollout.vllm.options import DTYPES, capabilities, check_settings, resolve
from engine.rollout.vllm.vllm_stream import VllmStream
from engine.rollout.vllm.vllm_types import LLM, LLMEngine
from engine.weight_transfer import BroadcastRound

Phase = Literal["serving", "asleep", "weights"]

# For each phase: its name, what vLLM does to enter it, and the way out of it.
_PHASES = {
    "serving": ("serving", "waking its KV cache", "call sleep first"),
    "asleep": ("asleep", "going to sleep", "call wake_weights first"),
    "weights": ("only weights are awake", "waking its weights", "call wake_kv first"),
}


@dataclass(frozen=True, slots=True)
class SleepMode:
    """Immutable: each call returns the state after it, or raises RolloutError."""

    phase: Phase = "serving"
    discarded: bool = False  # whether sleep discarded the weights: an update must load new ones

    def sleep(self, level: int) -> SleepMode:
        if level not in (1, 2):
            raise RolloutError(
                f"sleep(level={level}) is unknown; use 1 (weights go to host memory) or 2 (weights "
                "are discarded)"
            )
        self._require("sleep", "serving")
        return SleepMode("asleep", discarded=level == 2)

    def wake_weights(self) -> SleepMode:
        self._require("wake_weights", "asleep")
        return replace(self, phase="weights")

    def update(self) -> SleepMode:
        self._require("update of weights", "serving", "weights")
        return replace(self, discarded=False)

    def wake_kv(self) -> SleepMode:
        self._require("wake_kv", "weights")
        if self.discarded:
            raise RolloutError(
                "wake_kv before new weights: sleep(level=2) discarded the old ones; call "
                "update_weights first"
            )
        return SleepMode("serving")

    def generate(self) -> SleepMode:
        self._require("generate", "serving")
        return self

    def _require(self, call: str, *phases: Phase) -> None:
        if self.phase not in phases:
            name, _, way_out = _PHASES[self.phase]
            raise RolloutError(f"{call} while {name}: {way_out}")


@protocol.register_engine(
    "vllm",
    capabilities,
    options=lambda config: dict(
        config.vllm,
        tensor_parallel_size=config.tensor_parallel_size,
        lora=config.lora,
        routed_experts=config.enable_rollout_routing_replay,
    ),
    check=lambda config: check_settings(
        config.vllm, config.kv_cache_memory_mb, config.lora, config.enable_rollout_routing_replay
    ),
)
class VllmEngine:
    """Rollouts by vLLM, tokens in and tokens out.

    >>> engine = VllmEngine(model, max_num_seqs=512, kv_cache_memory_mb=256)
    >>> engine.shares_storage
    True
    """

    def __init__(self, model: nn.Module, *, load: bool = True, **options: Any) -> None:
        """Start vLLM (seconds) with `model`'s shape and, with `load`, its weights.

        In process, the parameters of `model`, a transformers causal LM, become views of vLLM's
        where the layouts agree: same Parameter objects, same numbers, contiguous, trainable and
        saveable as before. Of a model with adapters that vLLM applies itself, these are left out.
        Otherwise weights are copied in place. With `rank_groups` all ranks make the engine
        together, and those of a group are given the same requests.

        `options` are those of `options.resolve`. Raises RolloutError if vLLM is missing or does not
        start, ConfigError for settings that contradict the model or each other.
        """
        engine_launch.require_vllm()
        self._options = resolve(model, **options)
        self._vocabulary = int(getattr(model.config, "vocab_size"))  # noqa: B009
        self._guard, self._sleep_mode = protocol.WeightGuard("vllm"), SleepMode()
        self._model = model  # that was loaded last
        self._stream: VllmStream | None = None
        self._updating_to: int | None = None  # version of an update by `begin_update`
        parked = self._options.adapter_rank and self._options.share
        with weight_load.base_on_host(model) if parked else nullcontext():
            self._start(model, load)

    def _start(self, model: nn.Module, load: bool) -> None:
        llm = engine_launch.start(model, self._options)
        self._llm: LLM | None = llm
        try:
            weights = WorkerWeights if self._options.mode == "workers" else InProcessWeights
            self._weights: EngineWeights = weights(llm, self._options)
            request = weight_load.lora_request() if self._options.adapter_rank else None
            self._requests = LLMRequests(llm, self._options, request)
            self._guard.refuse("it was given no weights yet")
            if load:
                self.update_weights(model, version=0)
        except BaseException:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        return self._guard.version

    @property
    def shares_storage(self) -> bool:
        """True if vLLM's parameters are the trainer's."""
        return self._weights.shares_storage

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vLLM's weights, and so of `parameters`."""
        return DTYPES[self._options.dtype]

    @property
    def asleep(self) -> bool:
        """True from `sleep` to `wake_kv`."""
        return self._sleep_mode.phase != "serving"

    @property
    def _streaming(self) -> bool:
        """Whether a stream has requests."""
        return self._stream is not None and self._stream.in_flight + self._stream.waiting > 0

    def update_weights(self, model: nn.Module | None, version: int) -> None:
        """Serve `model`'s current weights as policy `version`; copies none that are shared.

        None: the numbers of the last model have changed. A sharded model (DTensor) is gathered by
        parameter: all its ranks must call. Raises RolloutError if it fails; then nothing is served.
        """
        self._model = self._model if model is None else model
        self._update(version, lambda: self._weights.load_model(self._model))

    def update_from(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve the whole parameters that `named` yields, by transformers' names, one at a time.

        Raises RolloutError as `update_weights` does, also when one is missing.
        """
        self._update(version, lambda: self._weights.load_tensors(named))

    def receive_weights(self, broadcast: BroadcastRound) -> None:
        """Begin to receive a broadcast into a copy of the weights; decoding goes on meanwhile."""
        self._running()
        if self._options.adapter_rank or self._options.settings.quantization:
            raise RolloutError("a broadcast has whole weights, neither adapters nor quantised ones")
        self._weights.transfer("update_weights", asdict(broadcast))

    def load_received(self, version: int) -> None:
        """Serve what `receive_weights` has received as policy `version`; raise as `update_from`."""
        self._update(version, lambda: self._weights.transfer("finish_weight_update"))

    def parameters(self) -> dict[str, Tensor]:
        """vLLM's live parameters (this rank's shards); write them after `begin_update`."""
        return self._weights.parameters()

    def begin_update(self, version: int) -> None:
        """Serve nothing until `finish_update(version)`; the trainer's model is no longer shared."""
        self._sleep_mode.update()
        self._running()
        self._guard.begin(version)
        self._weights.release()
        self._weights.invalidate()
        self._updating_to = version

    def finish_update(self, version: int) -> None:
        """End the update of `begin_update(version)`: all of `parameters()` was written."""
        if self._updating_to != version:
            raise RolloutError(
                f"finish_update({version}) without begin_update({version}); begin it first"
            )
        self._update(version, lambda: None)

    def _update(self, version: int, move: Callable[[], None]) -> None:
        self._updating_to = None
        with self._guard.updating(version):
            sleep_mode, engine = self._sleep_mode.update(), self._running()
            move()
            stream = self._stream if self._streaming else None
            if stream is not None:
                stream.note_version()
            if stream is not None and stream.keeps_kv:
                self._requests.cache_salt = str(version)  # later requests find no old blocks
            # What a stream decodes goes on, with keys and values of the new weights.
            elif not engine.reset_prefix_cache(reset_running_requests=stream is not None):
                raise RolloutError("vLLM kept its prefix cache, as requests are still running")
            self._sleep_mode = sleep_mode

    def stream(
        self,
        params: protocol.SamplingParams,
        *,
        max_num_seqs: int | None = None,
        longest_prompt: int | None = None,
        kv_on_update: KvOnUpdate = "recompute",
        keep_prefixes: bool = False,
    ) -> VllmStream:
        """Open a stream; limits and prefix cache are the engine's own, whatever the arguments.

        `kv_on_update` is as in `NativeEngine.stream`; with "keep" vLLM still computes anew what it
        preempts for lack of room. One stream at a time, and no `generate` while it has requests.
        Raises RolloutError.
        """
        self.require_serving()
        if self._streaming:
            raise RolloutError("another stream of this engine has requests; close that first")
        parts = self._requests, self._options, self._vocabulary, params
        self._stream = VllmStream(self, *parts, keeps_kv=kv_on_update == "keep")
        return self._stream

    def require_serving(self) -> None:
        """Raise RolloutError where nothing may be sampled now."""
        self._guard.check()
        self._sleep_mode.generate()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: protocol.SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[protocol.Completion]:
        """Return `n` completions a prompt, in order; `on_progress` gets the number finished so far.

        A completion ends at a stop token, at `max_new_tokens`, or at `max_model_len`. Raises
        RolloutError for a bad request, NaN logits, weights that are not whole, an engine that is
        asleep, and a worker process that dies.
        """
        self.require_serving()
        if self._streaming:
            raise RolloutError("vLLM decodes the requests of a stream; close that first")
        protocol.check_request(prompts, params, self._options.max_model_len, self._vocabulary)
        if not prompts:
            return []
        ids: list[str] = []
        try:
            for number, prompt in enumerate(prompts, params.first_prompt):
                ids += self._requests.submit(prompt, number, range(params.n), params)
            outputs = self._requests.collect(len(ids), on_progress)
        except VllmFailed as error:
            raise self.failed("decoding", error) from error
        except BaseException:  # Ctrl-C, or an error of `on_progress`: leave no request behind
            self._requests.abort(ids)
            raise
        return [
            self._requests.completion(row // params.n, outputs[id], self.policy_version)
            for row, id in enumerate(ids)
        ]

    def abort(self, ids: list[str]) -> None:
        """Abort these requests; those of an engine that was closed have ended with it."""
        if self._llm is not None:
            self._requests.abort(ids)

    def failed(self, doing: str, error: Exception) -> RolloutError:
        """End this engine, as vLLM failed; return an error with its words or a worker's death."""
        died = self._weights.monitor.died() if isinstance(self._weights, WorkerWeights) else None
        cause = f"vLLM failed while {doing}: {died or error}"
        self.close()
        self._guard.refuse(cause)
        return RolloutError(f"{cause}; create a new engine, or use rollout.engine=native")

    def _running(self) -> LLMEngine:
        """Return vLLM's engine; raise RolloutError once closed."""
        if self._llm is None:
            raise RolloutError("it was closed; create a new engine")
        return self._llm.llm_engine

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory: KV cache and weights (1: moved to the host, 2: discarded).

        Weights that are the trainer's own stay. Wake with `wake_weights`, update, `wake_kv`, in
        this order; any other raises RolloutError. After level 1 the update may be left out. On CPU
        nothing is freed.
        """
        if level == 2:
            self._weights.invalidate()
        self._transition(self._sleep_mode.sleep(level), lambda engine: engine.sleep(level))

    def wake_weights(self) -> None:
        """Make room for the weights again, before an update."""
        mode = self._sleep_mode.wake_weights()
        self._transition(mode, lambda engine: engine.wake_up(["weights"]))

    def wake_kv(self) -> None:
        """Make room for the KV cache again, after an update; then `generate` serves."""
        self._transition(self._sleep_mode.wake_kv(), lambda engine: engine.wake_up(["kv_cache"]))

    def _transition(self, new_mode: SleepMode, call: Callable[[LLMEngine], object]) -> None:
        """Make `call`; if it fails, vLLM's memory is in no known state, and nothing is served."""
        engine = self._running()
        try:
            call(engine)
        except Exception as error:
            raise self.failed(_PHASES[new_mode.phase][1], error) from error
        self._sleep_mode = new_mode

    def close(self) -> None:
        """End vLLM and give the trainer's parameters storage of their own; safe to call twice."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._guard.refuse("it was closed")
        weights = getattr(self, "_weights", None)
        if isinstance(weights, WorkerWeights):
            weights.monitor.end()
        elif weights is not None:
            weights.release()
        engine_launch.stop(llm)
