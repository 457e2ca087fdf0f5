"""Which experts the routers of a mixture choose: recorded, replayed, and how evenly.

A `Routing` is open around a forward pass and its backward pass, which computes layers with
checkpointed activations again. `engine.models.forward` tells it how the rows lie in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.models.packing import PackedRows, Sequences, left_align_tokens, restore_columns

_OPEN = "routing"  # an attribute of a model's body while a Routing is open


class Routing:
    """The routers of one pass over a batch.

    Tokens of the pass, T in all, are padded rows one after the other, or packed ones.
    """

    def __init__(self, model: nn.Module, batch: Batch, replay: bool) -> None:
        """`replay`: let routers choose what the batch's `routed_experts` say."""
        self._routers = routers(model)
        self._batch = batch
        self._replayed: Tensor | None = None  # [T, layers, k], once the rows are laid out
        self._asked = batch["routed_experts"] if replay else None
        self._logits: dict[int, Tensor] = {}  # by layer, [T, experts]
        self._chosen: dict[int, Tensor] = {}  # [T, k]
        self._seqs: Sequences | None = None
        self._places: Tensor | None = None  # [B, L]; where each row's tokens lie

    def lay_out(self, seqs: Sequences, rows: PackedRows | None, device: torch.device) -> None:
        """The rows are about to be run: padded, or packed as `rows`."""
        seqs = seqs.to(device)
        self._seqs = seqs
        places = torch.arange(seqs.input_ids.numel(), device=device)
        self._places = places.view_as(seqs.input_ids) if rows is None else rows.places
        if self._asked is None:
            return
        asked = left_align_tokens(self._batch, self._asked).to(device)  # [B, L, layers · k]
        tokens = seqs.input_ids.numel() if rows is None else rows.input_ids.numel()
        flat = asked.new_zeros(tokens, asked.shape[2])
        fed = self._fed(seqs)
        flat[self._places[fed]] = asked[fed]
        self._replayed = flat.view(tokens, len(self._routers), -1).long()

    def load_balancing_loss(self, like: Tensor) -> Tensor:
        """E · Σ_i f_i · p_i of each response token `[B, R]`, whose mean over them is the balancing
        loss of Switch Transformers (arXiv:2101.03961, equation 4), all layers together.

        f_i is how often expert i was chosen a token, p_i its probability. Float32; `like` has the
        shape.
        """
        assert self._seqs is not None, "a pass comes first"
        assert self._places is not None, "a pass comes first"
        seqs, layers = self._seqs, range(len(self._routers))
        read = self._places[seqs.rows, seqs.positions]
        probs = torch.stack([self._logits[i][read].float().softmax(-1) for i in layers])
        chosen = torch.stack([self._chosen[i][read] for i in layers])
        experts = probs.shape[-1]
        often = torch.bincount(chosen.flatten(), minlength=experts) / max(1, probs[..., 0].numel())
        each = experts * (probs.mean(0) @ often.to(probs.dtype))  # [N]
        out = torch.zeros(like.shape, dtype=torch.float32, device=each.device)
        return out.index_put((seqs.rows, seqs.columns), each)

    def routed_experts(self) -> Tensor:
        """What was chosen, as a batch has it: `[B, P+R, layers · k]`."""
        assert self._seqs is not None, "a pass comes first"
        assert self._places is not None, "a pass comes first"
        chosen = torch.stack([self._chosen[i] for i in range(len(self._routers))], 1)  # [T, l, k]
        rows = chosen.flatten(1)[self._places].masked_fill(~self._fed(self._seqs)[..., None], 0)
        return restore_columns(self._batch, rows.to(torch.int16).cpu())

    def _fed(self, seqs: Sequences) -> Tensor:
        """Which tokens `[B, L]` of each row are run whatever the layout: a last one predicts
        nothing."""
        assert seqs.lengths is not None, "rows are whole"
        assert seqs.prompts is not None, "rows are whole"
        ends = torch.maximum(seqs.lengths - 1, seqs.prompts)
        columns = torch.arange(seqs.input_ids.shape[1], device=ends.device)
        return columns < ends[:, None]

    def _hook(self, layer: int) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def choose(
            router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits, scores, chosen = output
            if self._replayed is not None:
                chosen = self._replayed[:, layer]
                scores = _scores(router, logits, chosen).to(scores.dtype)
            self._logits[layer], self._chosen[layer] = logits, chosen
            return logits, scores, chosen

        return choose


@contextmanager
def routing(model: nn.Module, batch: Batch, *, replay: bool = False) -> Iterator[Routing]:
    """Record what `model`'s routers choose in a pass over `batch`, or `replay` what it says."""
    found, body = Routing(model, batch, replay), _body(model)
    handles = [
        router.register_forward_hook(found._hook(layer))
        for layer, router in enumerate(found._routers)
    ]
    body.__dict__[_OPEN] = found
    try:
        yield found
    finally:
        del body.__dict__[_OPEN]
        for handle in handles:
            handle.remove()


def open_routing(model: nn.Module) -> Routing | None:
    """The Routing that is open for `model`, or for the model whose body it is."""
    found: Routing | None = getattr(_body(model), _OPEN, None)
    return found


def routers(model: nn.Module) -> list[nn.Module]:
    """A mixture's routers, first layer first; none of a dense model."""
    return [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]


def _scores(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights `[T, k]` of the chosen experts, as the router makes them of its own choice."""
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's have no such setting
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _body(model: nn.Module) -> nn.Module:
    return getattr(model, "base_model", model)
