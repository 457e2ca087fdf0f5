"""Requests of a vLLM engine: one a completion, each with its own seed, stepped until all end."""

import math
from collections.abc import Callable, Sequence

import torch

from engine.errors import DivergedRolloutError, RolloutError
from engine.rollout.protocol import Completion, SamplingParams
from engine.rollout.sampling import noise_keys
from engine.rollout.trainer_model import chosen_experts
from engine.rollout.vllm.options import VllmOptions
from engine.rollout.vllm.vllm_types import LLM, RequestOutput, Worker


class VllmFailed(RolloutError):
    """A failure of vLLM itself, whose state is then unknown."""


class LLMRequests:
    """Requests of one `vllm.LLM`; each is sent with `lora_request`, if any."""

    def __init__(self, llm: LLM, options: VllmOptions, lora_request: object = None) -> None:
        self._llm, self._lora_request = llm, lora_request
        self._max_model_len, self._seed = options.max_model_len, options.seed
        self._routed_layers = list(options.routed_layers)
        self._requests = 0
        self.cache_salt = ""  # requests share cached blocks with those of the same salt alone

    def submit(
        self, prompt: Sequence[int], number: int, noise: Sequence[int], params: SamplingParams
    ) -> list[str]:
        """Queue a completion for each of `noise`, a seed with `number`; return their ids."""
        import vllm

        indices = torch.tensor(noise)
        seed = params.seed + self._seed
        keys = noise_keys(seed, torch.full_like(indices, number), indices).tolist()
        room = self._max_model_len - len(prompt)
        request = vllm.TokensPrompt(prompt_token_ids=[int(token) for token in prompt])
        if self.cache_salt:
            request["cache_salt"] = self.cache_salt
        ids: list[str] = []
        try:
            for key in keys:
                ids.append(f"rollout-{self._requests}")
                self._requests += 1
                sampling = vllm.SamplingParams(
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    max_tokens=min(params.max_new_tokens, room),
                    stop_token_ids=list(params.stop_token_ids),
                    ignore_eos=True,
                    seed=key & (2**63 - 1),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
                )
                self._llm.llm_engine.add_request(
                    ids[-1], request, sampling, lora_request=self._lora_request
                )
        except BaseException:
            self.abort(ids)
            raise
        return ids

    def collect(
        self, count: int, on_progress: Callable[[int], None] | None
    ) -> dict[str, RequestOutput]:
        """Step until all `count` requests are done; return outputs by id. Raises VllmFailed."""
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < count:
            finished = [output for output in self.step() if output.finished]
            outputs.update((output.request_id, output) for output in finished)
            if finished and on_progress is not None:
                on_progress(len(outputs))
            if len(outputs) < count and not self._llm.llm_engine.has_unfinished_requests():
                raise VllmFailed(f"{count - len(outputs)} requests were left unanswered")
        return outputs

    def step(self) -> list[RequestOutput]:
        """Make one step of the engine; return the requests that ended. Raises VllmFailed."""
        try:
            return self._llm.llm_engine.step()
        except Exception as error:
            raise VllmFailed(str(error)) from error

    def kv_cache(self) -> tuple[int, int]:
        """Return tokens that the KV cache holds, at the longest context, and those of a block."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.kv_cache_size_tokens or 0), int(cache.block_size)

    def lengths(self) -> dict[str, int]:
        """Return the tokens sampled so far for each request that hasn't ended, by id."""
        states = self._llm.llm_engine.output_processor.request_states.values()
        return {state.external_req_id: len(state.detokenizer.output_token_ids) for state in states}

    def unfinished(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return tokens and log-probs of each request that hasn't ended, by id."""
        return {
            state.external_req_id: (
                list(state.detokenizer.output_token_ids),
                list(state.logprobs_processor.logprobs.logprobs),
            )
            for state in self._llm.llm_engine.output_processor.request_states.values()
        }

    def abort(self, ids: list[str]) -> None:
        """Abort these requests in vLLM."""
        self._llm.llm_engine.abort_request(ids)

    def completion(self, index: int, output: RequestOutput, version: int) -> Completion:
        """Build the completion of prompt `index`; RolloutError for NaN logits or a bad end."""
        answer = output.outputs[0]
        tokens, log_probs = list(answer.token_ids), list(answer.logprobs.logprobs)
        if any(map(math.isnan, log_probs)):
            # A NaN left in a cache block would outlast its request: 0 times NaN is NaN.
            self._llm.collective_rpc(_clear_kv_cache)
            raise DivergedRolloutError(
                f"the model gave NaN logits for a completion of prompt {index}; its weights have "
                f"diverged: go back to a checkpoint and lower the learning rate"
            )
        if answer.finish_reason not in ("stop", "length") or len(tokens) != len(log_probs):
            raise RolloutError(
                f"vLLM ended a completion of prompt {index} with finish_reason="
                f"{answer.finish_reason!r}, {len(tokens)} tokens and {len(log_probs)} log-probs; "
                f"create a new engine"
            )
        reason, read = answer.finish_reason, len(output.prompt_token_ids) + len(tokens) - 1
        experts = chosen_experts(answer.routed_experts, self._routed_layers, read)
        return Completion(index, tokens, log_probs, reason, version, routed_experts=experts)


def _clear_kv_cache(worker: Worker) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.zero_()
