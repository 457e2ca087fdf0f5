"""Compares a server's log-probs of a few tokens with the trainer's model.

It finds what no version tag can: a server of another model, one whose log-probs are not those of
the distribution it samples from, or half of the new weights. It can't distinguish two policies a
small step apart, as the tags do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.causal_lm import embedding_weight, eval_mode
from engine.rollout.protocol import SamplingParams
from engine.rollout.server.api import CompletionRequest, SampledCompletion

_TOKENS = 16
_PARAMS = SamplingParams(temperature=0.7)  # other than 1, so that raw log-probs show


def probe_request(prompt: list[int], max_model_len: int) -> CompletionRequest:
    """One completion of a short prompt."""
    prompt = prompt[: max_model_len - 1]
    return CompletionRequest(prompt, 1, min(_TOKENS, max_model_len - len(prompt)), 1, _PARAMS)


def check_log_probs(
    model: nn.Module, request: CompletionRequest, drawn: SampledCompletion, tolerance: float
) -> None:
    """Raise RolloutError if `drawn`'s log-probs are `tolerance` or more from `model`'s, on average.

    A model whose own log-probs are not finite passes: decoding reports that.
    """
    logits = _logits(model, request.prompt, drawn.token_ids)
    said = torch.tensor(drawn.log_probs)
    ours = _log_probs(logits / request.params.temperature, drawn.token_ids)
    if not len(said) or not bool(ours.isfinite().all()):
        return
    distance = float((said - ours).abs().mean())
    if distance < tolerance:
        return
    raw = float((said - _log_probs(logits, drawn.token_ids)).abs().mean())
    if raw < tolerance:
        raise RolloutError(
            "the rollout server's log-probs are those of the model before temperature, top-k and "
            "top-p, not those that tokens were drawn with; start vLLM with "
            "--logprobs-mode processed_logprobs"
        )
    raise RolloutError(
        f"the rollout server's log-probs are {distance:.3f} from the policy's on average over "
        f"{len(said)} tokens: it serves another model or other weights; start it with the "
        f"policy's folder, or raise rollout.server.probe_tolerance={tolerance:g}"
    )


@torch.no_grad()
def _logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """float32 `[len(tokens), V]`, of the positions that drew `tokens`."""
    device = embedding_weight(model).device
    with eval_mode(model):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]], device=device)).logits[0]
    rows: Tensor = logits[len(prompt) - 1 : -1].float().cpu()
    return rows


def _log_probs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
