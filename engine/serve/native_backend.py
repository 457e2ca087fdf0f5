"""The native rollout engine behind `api_server`: texts become tokens, and tokens texts.

What is decoded when is `fair_decoder`'s. Loads torch, so it is imported once the server listens.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.data.templates import decode_response, encode_prompts, encode_text, stop_token_ids
from engine.errors import DataError, ModelError, RolloutError
from engine.models import load_model, resolve_dtype, text_config
from engine.openai_api import schema
from engine.openai_api.schema import Answer, ChatRequest, Completions, RequestError, RequestLimits
from engine.rollout import protocol
from engine.rollout.protocol import RolloutEngine, SamplingParams
from engine.rollout.trainer_model import context_length
from engine.runtime.policy_runtime import open_tokenizer
from engine.serve.api_server import SMALL, Accepted
from engine.serve.fair_decoder import Decoded, Event, FairDecoder, Job

_CHARACTERS = 16  # a token, more than a text has on average; a longer text is looked at first
_TAIL = 64  # tokens that the end of a text may change


class _Texts(NamedTuple):
    """A tokenizer, and the one thread that may use it."""

    tokenizer: PreTrainedTokenizerBase
    thread: ThreadPoolExecutor


class NativeBackend:
    """A loaded model: texts in, texts out."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        stops: tuple[int, ...],
        context: int,
        vocabulary: int,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Serve `engine`; `model` is the engine's, for log-probs of prompts."""
        self.context = context
        self._stops, self._vocabulary = stops, vocabulary
        self._texts = _Texts(tokenizer, ThreadPoolExecutor(1))
        self._large_texts = _Texts(copy.deepcopy(tokenizer), ThreadPoolExecutor(1))
        self._decoder = FairDecoder(engine, model)

    @classmethod
    def load(cls, folder: Path, max_model_len: int | None) -> Self:
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
        return cls(engine, tokenizer, stops, context, int(shape.vocab_size), model)

    async def submit(self, request: Completions, limits: RequestLimits) -> Accepted:
        """Queue a request; RequestError for a prompt that can't be completed, and for too much."""
        loop, texts = asyncio.get_running_loop(), _written(request)
        tokenizer, thread = self._large_texts if sum(map(len, texts)) > SMALL else self._texts
        prompts = await loop.run_in_executor(thread, self._encode, tokenizer, request, texts)
        longest = [min(request.longest or self.context, self.context - len(p)) for p in prompts]
        schema.check_tokens(limits, len(prompts), request.n or 1, max(longest))
        prompt_tokens, top_k = sum(map(len, prompts)), getattr(request, "prompt_logprobs", None)
        if top_k is not None and prompt_tokens * (top_k + 1) > limits.max_tokens:
            raise RequestError(
                f"prompt_logprobs={top_k} of {prompt_tokens} tokens are more than "
                f"{limits.max_tokens} log-probs; lower it, or send several requests"
            )
        params = SamplingParams(
            n=request.n or 1,
            max_new_tokens=max(longest),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=request.top_p or 1.0,
            seed=(request.seed or 0) & (2**62 - 1),
            stop_token_ids=self._stops,
        )
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and its clients with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(prompts, params, longest, request.seed is not None, deliver, top_k)
        log_probs: list[object] = []
        answers = self._answers(events, request.stops, log_probs)
        self._decoder.submit(job)
        return Accepted(prompt_tokens, answers, log_probs, partial(setattr, job, "cancelled", True))

    def close(self) -> None:
        self._decoder.close()

    async def _answers(
        self, events: asyncio.Queue[Event], stops: Sequence[str], log_probs: list[object]
    ) -> AsyncIterator[tuple[int, Answer]]:
        loop = asyncio.get_running_loop()
        while (event := await events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Decoded):
                thread = self._texts.thread
                yield event.index, await loop.run_in_executor(thread, self._answer, event, stops)
            else:
                log_probs.append(event)

    def _encode(
        self, tokenizer: PreTrainedTokenizerBase, request: Completions, texts: Sequence[str]
    ) -> list[list[int]]:
        try:
            for i, text in enumerate(texts):
                self._check_length(tokenizer, i, text)
            if isinstance(request, ChatRequest):
                chat = [message.plain() for message in request.messages]
                if (chat[-1]["role"] == "assistant") != bool(request.continue_final_message):
                    raise RequestError(
                        "messages end with the assistant's where, and only where, it is to be gone "
                        "on with: set continue_final_message=true for that"
                    )
                prompts = encode_prompts(tokenizer, [chat], "messages")
            else:
                prompts = [
                    encode_text(tokenizer, prompt) if isinstance(prompt, str) else prompt
                    for prompt in request.prompts
                ]
            for i, prompt in enumerate(prompts):
                protocol.check_prompt(f"prompt {i}", prompt, self.context, self._vocabulary)
        except (DataError, ModelError, RolloutError) as error:
            raise RequestError(str(error)) from None
        if not prompts:
            raise RequestError("prompt is empty; give a text or token ids")
        return prompts

    def _check_length(self, tokenizer: PreTrainedTokenizerBase, index: int, text: str) -> None:
        """Refuse a text that can't fit by its beginning: megabytes would take minutes to encode."""
        head = text[: _CHARACTERS * self.context]
        if len(text) > len(head) and len(encode_text(tokenizer, head)) > self.context + _TAIL:
            raise RequestError(
                f"prompt {index} has {len(text)} characters, which leaves no room for a completion "
                f"in the {self.context} tokens of the model; shorten it"
            )

    def _answer(self, decoded: Decoded, stops: Sequence[str]) -> Answer:
        """Return a completion as text, up to the first of `stops`."""
        ids = decoded.token_ids
        ended = bool(ids) and ids[-1] in self._stops
        text = decode_response(self._texts.tokenizer, ids[:-1] if ended else ids)
        ends = [at for at in map(text.find, stops) if at >= 0]
        reason = "stop" if ends else decoded.finish_reason
        return Answer(text[: min(ends, default=None)], len(ids), reason)


def _written(request: Completions) -> list[str]:
    """The texts of a request, a chat's in one."""
    if isinstance(request, ChatRequest):
        return ["\n".join(message.plain()["content"] for message in request.messages)]
    return [prompt for prompt in request.prompts if isinstance(prompt, str)]
