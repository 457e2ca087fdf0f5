"""Experts that the routers of a mixture-of-experts model choose: recorded, replayed, balanced.

A `Routing` is open around a forward pass and its backward pass, which computes layers with
checkpointed activations again. `forward` tells it how the rows lie in the pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.models.packing import PackedRows, Sequences, body_of, left_align_tokens, restore_columns

_OPEN = "routing"  # an attribute of a model's body while a Routing is open


class Routing:
    """The routers of one pass over a batch, of T tokens: padded rows one by one, or packed ones."""

    def __init__(self, model: nn.Module, batch: Batch, replay: bool) -> None:
        """`replay`: let routers choose what the batch's `routed_experts` say."""
        self._routers = routers(model)
        self._batch = batch
        self._replayed: Tensor | None = None  # [T, layers, k], once the rows are laid out
        self._recorded = batch["routed_experts"] if replay else None
        self._logits: dict[int, Tensor] = {}  # by layer, [T, experts]
        self._chosen: dict[int, Tensor] = {}  # [T, k]
        self._rows: tuple[Sequences, Tensor] | None = None  # and [B, L]; where their tokens lie

    def lay_out(self, seqs: Sequences, rows: PackedRows | None, device: torch.device) -> None:
        """Note how the rows that run next lie: padded, or packed as `rows`."""
        seqs = seqs.to(device)
        places = torch.arange(seqs.input_ids.numel(), device=device).view_as(seqs.input_ids)
        places = places if rows is None else rows.places
        self._rows = seqs, places
        if self._recorded is None:
            return
        experts = left_align_tokens(self._batch, self._recorded).to(device)  # [B, L, layers · k]
        tokens = seqs.input_ids.numel() if rows is None else rows.input_ids.numel()
        flat = experts.new_zeros(tokens, experts.shape[2])
        fed = self._fed(seqs)
        flat[places[fed]] = experts[fed]
        self._replayed = flat.view(tokens, len(self._routers), -1).long()

    def load_balancing_loss(self, like: Tensor) -> Tensor:
        """Compute E · Σ_i f_i · p_i of each response token `[B, R]`, all layers together.

        Its mean over them is the loss of Switch Transformers (arXiv:2101.03961, equation 4). f_i is
        how often expert i was chosen a token, p_i its probability. Float32; `like` has the shape.
        """
        assert self._rows is not None, "a pass comes first"
        (seqs, places), layers = self._rows, range(len(self._routers))
        read = places[seqs.rows, seqs.positions]
        probs = torch.stack([self._logits[i][read].float().softmax(-1) for i in layers])
        chosen = torch.stack([self._chosen[i][read] for i in layers])
        experts = probs.shape[-1]
        shares = torch.bincount(chosen.flatten(), minlength=experts) / max(1, probs[..., 0].numel())
        loss = experts * (probs.mean(0) @ shares.to(probs.dtype))  # [N]
        out = torch.zeros(like.shape, dtype=torch.float32, device=loss.device)
        return out.index_put((seqs.rows, seqs.columns), loss)

    def routed_experts(self) -> Tensor:
        """Return the chosen experts as a batch has them: `[B, P+R, layers · k]` int16."""
        assert self._rows is not None, "a pass comes first"
        seqs, places = self._rows
        chosen = torch.stack([self._chosen[i] for i in range(len(self._routers))], 1)  # [T, l, k]
        rows = chosen.flatten(1)[places].masked_fill(~self._fed(seqs)[..., None], 0)
        return restore_columns(self._batch, rows.to(torch.int16).cpu())

    def _fed(self, seqs: Sequences) -> Tensor:
        """Return which tokens `[B, L]` are run in any layout: a row's last predicts nothing."""
        assert seqs.lengths is not None, "rows are whole"
        assert seqs.prompts is not None, "rows are whole"
        ends = torch.maximum(seqs.lengths - 1, seqs.prompts)
        columns = torch.arange(seqs.input_ids.shape[1], device=ends.device)
        return columns < ends[:, None]

    def _choose(
        self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, chosen = output
        if self._replayed is not None:
            chosen = self._replayed[:, layer]
            scores = _scores(router, logits, chosen).to(scores.dtype)
        self._logits[layer], self._chosen[layer] = logits, chosen
        return logits, scores, chosen


@contextmanager
def routing(model: nn.Module, batch: Batch, *, replay: bool = False) -> Iterator[Routing]:
    """Record what `model`'s routers choose in a pass over `batch`, or `replay` what it says."""
    opened, body = Routing(model, batch, replay), body_of(model)
    handles = [
        router.register_forward_hook(partial(opened._choose, layer))
        for layer, router in enumerate(opened._routers)
    ]
    body.__dict__[_OPEN] = opened
    try:
        yield opened
    finally:
        del body.__dict__[_OPEN]
        for handle in handles:
            handle.remove()


def open_routing(model: nn.Module) -> Routing | None:
    """Return the Routing that is open for `model`, or for the model whose body it is."""
    return getattr(body_of(model), _OPEN, None)


def routers(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a mixture of experts, first layer first; none of a dense model."""
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


def _scores(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Compute the weights `[T, k]` of the chosen experts, as the router does of its own choice."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's have no such setting
        probs = probs / probs.sum(-1, keepdim=True)
    return probs
