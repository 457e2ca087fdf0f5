"""The native rollout engine behind `api_server`: texts become tokens, and requests batches.

Requests that wait and draw tokens in the same way are decoded together, up to `BATCH` sequences at
once; one with a seed of its own is decoded alone, so that it gives the same tokens whoever else
asks. Loads torch, so it is imported once the server listens.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.data.templates import decode_response, encode_prompts, encode_text, stop_token_ids
from engine.errors import DataError, ModelError, RolloutError
from engine.models import load_model, resolve_dtype, text_config
from engine.rollout import protocol
from engine.rollout.protocol import RolloutEngine, SamplingParams
from engine.rollout.trainer_model import context_length
from engine.runtime.policy_runtime import open_tokenizer
from engine.serve.api_server import Answer, ChatRequest, Completions, RequestError

BATCH = 64  # sequences
Decoded = tuple[list[int], str]  # token ids, and why they end: "stop" or "length"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a request."""

    prompt: Sequence[int]
    params: SamplingParams
    has_seed: bool  # whether params.seed is the client's
    result: Future[list[Decoded]] = field(default_factory=Future)  # params.n completions

    @property
    def batch_key(self) -> object:
        """Equal for jobs that can be decoded in one call; lengths are rounded up together."""
        params = self.params
        if self.has_seed:
            return id(self)
        longest = 1 << (params.max_new_tokens - 1).bit_length()
        return params.n, params.temperature, params.top_k, params.top_p, longest


class Batcher:
    """Decodes jobs until it is closed.

    >>> batcher = Batcher(engine)
    >>> batcher.submit([5, 6, 7], SamplingParams(max_new_tokens=8), False).result(timeout=60)
    [([9, 4, 2], 'stop')]
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._taken: list[Job] = []  # taken from the queue, of another kind than what is decoded
        self._random = random.Random()
        self._closed = False
        threading.Thread(target=self._run, name="decode", daemon=True).start()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, has_seed: bool
    ) -> Future[list[Decoded]]:
        """Queue a prompt's completions; the prompt must have been checked."""
        job = Job(prompt, params, has_seed)
        if self._closed:
            job.result.set_exception(RolloutError("the server is stopping"))
        else:
            self._waiting.put(job)
        return job.result

    def close(self) -> None:
        """Take no more jobs; those that wait are cancelled, one that is decoded ends by itself."""
        self._closed = True
        self._waiting.put(None)

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._decode(batch)
            except Exception as error:  # goes to its clients; the next batch is tried
                _log.exception("a batch of %d requests failed", len(batch))
                for job in batch:
                    if not job.result.done():
                        job.result.set_exception(error)
        for job in self._taken:
            job.result.cancel()

    def _next_batch(self) -> list[Job]:
        """Wait for a job; return it with all others of its kind that fit, none when closed."""
        batch: list[Job] = []
        while not batch:
            while not self._taken or not self._waiting.empty():
                job = self._waiting.get()
                if job is None:
                    return []
                self._taken.append(job)
            first, not_in_batch, size = self._taken[0].batch_key, [], 0
            for job in self._taken:
                if job.batch_key != first or (batch and size + job.params.n > BATCH):
                    not_in_batch.append(job)
                elif job.result.set_running_or_notify_cancel():  # else its client has gone
                    batch.append(job)
                    size += job.params.n
            self._taken = not_in_batch
        return batch

    def _decode(self, batch: list[Job]) -> None:
        first = batch[0].params
        seed = first.seed if batch[0].has_seed else self._random.getrandbits(62)
        longest = max(job.params.max_new_tokens for job in batch)
        params = replace(first, max_new_tokens=longest, seed=seed)
        completions = self._engine.generate([job.prompt for job in batch], params)
        for i, job in enumerate(batch):
            answers: list[Decoded] = []  # as they would have ended at the job's own limit
            limit = job.params.max_new_tokens
            for c in completions[i * params.n : (i + 1) * params.n]:
                reason = "length" if len(c.token_ids) > limit else c.finish_reason
                answers.append((c.token_ids[:limit], reason))
            job.result.set_result(answers)


class NativeBackend:
    """A loaded model: texts in, texts out."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        stops: tuple[int, ...],
        context: int,
        vocabulary: int,
        model: Any = None,
    ) -> None:
        """Serve `engine`; `model` is the engine's, for log-probs of prompts."""
        self.context, self._model = context, model
        self._tokenizer, self._stops, self._vocabulary = tokenizer, stops, vocabulary
        self._texts = ThreadPoolExecutor(1)  # a tokenizer is not safe for use by two threads
        self._batcher = Batcher(engine)

    @staticmethod
    def load(folder: Path, max_model_len: int | None) -> NativeBackend:
        """Load a model's folder onto this process's device.

        Its weights are bfloat16 where the hardware computes in it, else float32. Raises ModelError
        for a folder that can't be loaded and ConfigError for a length beyond the model's context.
        """
        tokenizer, shape = open_tokenizer(folder), text_config(folder)
        model = load_model(folder, resolve_dtype("auto", shape.hidden_size)).eval()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.nn.Module.to(model, device)  # in place
        context = protocol.resolve_max_model_len(max_model_len, context_length(model))
        engine = protocol.create_engine("native", model, max_model_len=context)
        stops = stop_token_ids(tokenizer, model.generation_config)
        return NativeBackend(engine, tokenizer, stops, context, int(shape.vocab_size), model)

    async def complete(self, request: Completions) -> tuple[list[Answer], int, list[object]]:
        """Return all answers to a request in order, its prompts' tokens, and any log-probs.

        Raises RequestError for a prompt that can't be completed. Where it is cancelled, so are
        those of its prompts that still wait.
        """
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._texts, self._encode, request)
        longest, jobs = request.longest or self.context, []
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                n=request.n or 1,
                max_new_tokens=min(longest, self.context - len(prompt)),
                temperature=1.0 if request.temperature is None else request.temperature,
                top_k=max(request.top_k or 0, 0),
                top_p=request.top_p or 1.0,
                seed=(request.seed or 0) & (2**62 - 1),
                stop_token_ids=self._stops,
                first_prompt=i,
            )
            jobs.append(self._batcher.submit(prompt, params, request.seed is not None))
        decoded = await asyncio.gather(*map(asyncio.wrap_future, jobs))

        def answer() -> tuple[list[Answer], list[object]]:
            answers = [self._answer(*row, request.stops) for group in decoded for row in group]
            top_k = getattr(request, "prompt_logprobs", None)
            if top_k is None:
                return answers, []
            return answers, [prompt_log_probs(self._model, prompt, top_k) for prompt in prompts]

        answers, log_probs = await loop.run_in_executor(self._texts, answer)
        return answers, sum(map(len, prompts)), log_probs

    def close(self) -> None:
        """Decode nothing more."""
        self._batcher.close()

    def _encode(self, request: Completions) -> list[list[int]]:
        try:
            if isinstance(request, ChatRequest):
                chat = [message.plain() for message in request.messages]
                prompts = encode_prompts(self._tokenizer, [chat], "messages")
            else:
                prompts = [
                    encode_text(self._tokenizer, prompt) if isinstance(prompt, str) else prompt
                    for prompt in request.prompts
                ]
            for i, prompt in enumerate(prompts):
                protocol.check_prompt(f"prompt {i}", prompt, self.context, self._vocabulary)
        except (DataError, ModelError, RolloutError) as error:
            raise RequestError(str(error)) from None
        if not prompts:
            raise RequestError("prompt is empty; give a text or token ids")
        return prompts

    def _answer(self, ids: list[int], reason: str, stops: Sequence[str]) -> Answer:
        """Return a completion as text, up to the first of `stops`."""
        ended = bool(ids) and ids[-1] in self._stops
        text = decode_response(self._tokenizer, ids[:-1] if ended else ids)
        ends = [at for at in map(text.find, stops) if at >= 0]
        return Answer(text[: min(ends, default=None)], len(ids), "stop" if ends else reason)


LogProbs = dict[str, dict[str, float]]


@torch.inference_mode()
def prompt_log_probs(
    model: PreTrainedModel, ids: Sequence[int], top_k: int
) -> list[LogProbs | None]:
    """Return the log-probs of each token of a prompt; None for the first.

    An entry has the ids of the likeliest tokens, and the token's own, each with `logprob` (at
    temperature 1) and `rank` (from 1, of equals the highest).
    """
    tokens = torch.tensor(ids, device=model.device)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
    log_probs = logits.log_softmax(-1)
    token_log_probs = log_probs.gather(1, tokens[1:, None])
    ranks = (log_probs > token_log_probs).sum(1) + 1
    top_log_probs, likeliest = log_probs.topk(min(top_k, log_probs.shape[1]))
    rows: list[LogProbs | None] = [None]
    columns = (tokens[1:], token_log_probs[:, 0], ranks, likeliest, top_log_probs)
    lists = (column.tolist() for column in columns)
    for token, log_prob, rank, top, values in zip(*lists, strict=True):
        row = {str(id): {"logprob": values[at], "rank": at + 1} for at, id in enumerate(top)}
        rows.append(row | {str(token): {"logprob": log_prob, "rank": rank}})
    return rows
