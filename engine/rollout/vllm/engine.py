"""The rollout engine `vllm`: a vLLM engine in this process, on the trainer's weights.

Where layouts agree, vLLM's parameters and the trainer's are one storage (see `weights.py`), and
`update_weights` only drops the prefix cache; otherwise it copies in place. Starting and ending vLLM
is `launch.py`'s work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.protocol import Completion, SamplingParams, register_engine
from engine.rollout.requests import (
    RolloutStats,
    WeightGuard,
    check_request,
    resolve_max_model_len,
)
from engine.rollout.sampling import row_keys
from engine.rollout.vllm import launch, weights


@register_engine("vllm")
class VllmEngine:
    """Rollouts by vLLM, tokens in and tokens out.

    >>> engine = VllmEngine(model, max_num_seqs=512, kv_cache_memory_mb=256)
    >>> engine.shares_storage
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int = 512,
        max_model_len: int | None = None,
        kv_cache_memory_mb: int = 256,
        seed: int = 0,
    ) -> None:
        """Start vLLM (seconds) with `model`'s shape and weights.

        The parameters of `model`, a transformers causal LM, become views of vLLM's where the
        layouts agree: same Parameter objects, same numbers, contiguous, trainable and saveable as
        before. `seed` is added to that of each request. Raises RolloutError if vLLM is missing or
        does not start, ConfigError for a length beyond the model's context.
        """
        if max_num_seqs < 1:
            raise RolloutError(f"max_num_seqs={max_num_seqs} decodes nothing; use 1 or more")
        launch.require_vllm()
        config: Any = model.config
        context = getattr(config, "max_position_embeddings", None)
        self._max_model_len = resolve_max_model_len(max_model_len, context)
        self._vocabulary = int(config.vocab_size)
        self._seed, self._requests = seed, 0
        self.stats = RolloutStats()
        self._guard = WeightGuard("vllm")
        self._own_group = not torch.distributed.is_initialized()
        self._llm: Any = launch.start(
            model, max_num_seqs, self._max_model_len, kv_cache_memory_mb, seed
        )
        self._target: nn.Module = self._llm.apply_model(lambda module: module)[0]
        self._model: nn.Module | None = None
        self._views: dict[str, Tensor] | None = None
        self.update_weights(model, version=0)

    @property
    def policy_version(self) -> int:
        return self._guard.version

    @property
    def shares_storage(self) -> bool:
        """True if vLLM's parameters are the trainer's."""
        return self._views is not None

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Serve `model`'s current weights as policy `version`; copies none that are shared."""
        with self._guard.updating(version):
            if self._model is not model:
                self._release()
                self._model = model
            if self._views is None or not weights.is_shared(model, self._views):
                weights.copy_into(self._target, model)
                self._views = weights.plan(model, self._target)
                if self._views is not None:
                    weights.share(model, self._views)
            if not self._llm.llm_engine.reset_prefix_cache():
                raise RolloutError("vLLM kept its prefix cache, as requests are still running")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Return `n` completions a prompt, in order; `on_progress` gets the number finished so far.

        A completion ends at a stop token, at `max_new_tokens`, or at `max_model_len`. Raises
        RolloutError for a bad request, NaN logits, and weights that are not whole.
        """
        self._guard.check()
        check_request(prompts, params, self._max_model_len, self._vocabulary)
        self.stats = RolloutStats(prompt_tokens=sum(map(len, prompts)))
        if not prompts:
            return []
        started = time.perf_counter()
        ids = self._submit(prompts, params)
        try:
            outputs = self._collect(set(ids), on_progress)
        except Exception as error:
            self._guard.refuse(f"vLLM failed while decoding: {error}")
            raise RolloutError(
                f"vLLM failed while decoding: {error}; create the engine anew, or use "
                f"rollout.engine=native"
            ) from error
        except BaseException:  # Ctrl-C: leave no request behind
            self._llm.llm_engine.abort_request(ids)
            raise
        completions = [
            self._completion(row // params.n, outputs[request]) for row, request in enumerate(ids)
        ]
        self.stats.seconds = time.perf_counter() - started
        return completions

    def _submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """Queue a request for each completion, with a seed of its own; return their ids."""
        import vllm

        row = torch.arange(len(prompts) * params.n)
        keys = row_keys(params.seed + self._seed, row // params.n, row % params.n)
        ids: list[str] = []
        for prompt in prompts:
            room = self._max_model_len - len(prompt)
            tokens = [int(token) for token in prompt]
            for _ in range(params.n):
                ids.append(f"rollout-{self._requests}")
                self._requests += 1
                sampling = vllm.SamplingParams(
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    max_tokens=min(params.max_new_tokens, room),
                    stop_token_ids=list(params.stop_token_ids),
                    ignore_eos=True,
                    seed=int(keys[len(ids) - 1]) & (2**63 - 1),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                )
                request = vllm.TokensPrompt(prompt_token_ids=tokens)
                self._llm.llm_engine.add_request(ids[-1], request, sampling)
        return ids

    def _collect(
        self, waiting: set[str], on_progress: Callable[[int], None] | None
    ) -> dict[str, Any]:
        """Step the engine until all requests in `waiting` are done; return their outputs by id."""
        done: dict[str, Any] = {}
        while len(done) < len(waiting):
            finished = [o for o in self._llm.llm_engine.step() if o.finished]
            self.stats.decode_steps += 1
            done.update((output.request_id, output) for output in finished)
            if finished and on_progress is not None:
                on_progress(len(done))
            if len(done) < len(waiting) and not self._llm.llm_engine.has_unfinished_requests():
                raise RolloutError(
                    f"vLLM ended with {len(waiting) - len(done)} requests unanswered; create the "
                    f"engine anew"
                )
        return done

    def _completion(self, index: int, output: Any) -> Completion:
        answer = output.outputs[0]
        tokens, log_probs = list(answer.token_ids), list(answer.logprobs.logprobs)
        if any(map(math.isnan, log_probs)):
            # Left in a cache block, a NaN would outlast its request: 0 times NaN is NaN.
            self._llm.collective_rpc(_clear_kv_cache)
            raise RolloutError(
                f"the model gave NaN logits for a completion of prompt {index}; its weights have "
                f"diverged: go back to a checkpoint and lower the learning rate"
            )
        if answer.finish_reason not in ("stop", "length") or len(tokens) != len(log_probs):
            raise RolloutError(
                f"vLLM ended a completion of prompt {index} with finish_reason="
                f"{answer.finish_reason!r}, {len(tokens)} tokens and {len(log_probs)} log-probs; "
                f"create the engine anew"
            )
        self.stats.generated_tokens += len(tokens)
        self.stats.prefill_tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
        return Completion(index, tokens, log_probs, answer.finish_reason, self.policy_version)

    def close(self) -> None:
        """End vLLM and give the trainer's parameters storage of their own; safe to call twice."""
        if self._llm is None:
            return
        self._guard.refuse("it was closed")
        self._release()
        launch.stop(self._llm, self._own_group)
        self._llm = self._model = None
        self._target = nn.Module()

    def _release(self) -> None:
        if self._model is not None and self._views is not None:
            weights.release(self._model, self._views)
        self._views = None


def _clear_kv_cache(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
