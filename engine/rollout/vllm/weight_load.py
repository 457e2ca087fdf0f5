"""An update of a live vLLM model by vLLM's own loaders: whole tensors in, this rank's shards kept.

Plain weights are copied in place. Weights that vLLM quantises are loaded layer by layer: once a
layer has all of its tensors, vLLM quantises it again, packs it as its kernels want it, and copies
the result to where the old one was, so that CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.vllm import patches
from engine.rollout.vllm.vllm_types import ModelRunner, VllmConfig

Named = Iterable[tuple[str, Tensor]]


def begin_load(runner: ModelRunner) -> WeightLoad:
    """Begin an update of the model of one of vLLM's workers."""
    config = runner.vllm_config
    kind = WeightLoad if config.model_config.quantization is None else QuantizedLoad
    return kind(runner.get_model(), config)


class WeightLoad:
    """One update, in as many calls of `load` as it takes, then `finish`."""

    def __init__(self, target: nn.Module, config: VllmConfig) -> None:
        """`target` is vLLM's model and `config` what it was made by."""
        self._target, self._config = target, config
        self._names = {name for name, _ in target.named_parameters()}  # to be filled
        self._sent: set[str] = set()  # in vLLM's naming, parts of fused matrices apart
        self._loaded: set[str] | None = set()  # None: this model's loader doesn't say

    def load(self, named: Named) -> None:
        """Copy whole tensors, by the trainer's names, into vLLM's parameters; a rank its shards."""
        loader: Any = self._target
        loaded = loader.load_weights(self._recording(named))
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def finish(self, whole: bool) -> None:
        """End the update; with `whole`, raise RolloutError if a parameter or part was not given."""
        missing = self._unfilled(self._loaded) if whole and self._loaded is not None else ()
        if missing:
            first = ", ".join(sorted(missing)[:3])
            raise RolloutError(
                f"the update lacks {len(missing)} of the model's weights, such as {first}; give "
                "every parameter, or use rollout.engine=native for this architecture"
            )

    def _recording(self, named: Named) -> Named:
        mapper = rename_mapper(self._target)
        for name, tensor in named:
            self._sent.add((mapper.map_name(name) if mapper is not None else None) or name)
            yield name, tensor

    def _unfilled(self, loaded: set[str]) -> set[str]:
        known = {_plain_name(name) for name in loaded}
        missing = {name for name in self._names if _plain_name(name) not in known}
        parts: dict[str, list[str]] = getattr(self._target, "packed_modules_mapping", {})
        for name in self._names:
            plain = _plain_name(name)
            entries = plain.split(".")
            for at, piece in enumerate(entries):
                for part in parts.get(piece, ()):
                    source = ".".join([*entries[:at], part, *entries[at + 1 :]])
                    if source not in self._sent and plain not in self._sent:
                        missing.add(source)
        return missing


class QuantizedLoad(WeightLoad):
    """An update of a model that vLLM quantises, from tensors that are not quantised."""

    def __init__(self, target: nn.Module, config: VllmConfig) -> None:
        from vllm.model_executor.model_loader import reload

        self._reload = reload
        self._config = config
        self._target = target
        self._finalize()  # what an update that failed has left
        every = dict(target.named_parameters(remove_duplicate=False))
        tied = every.keys() - dict(target.named_parameters()).keys()  # tied again at the end
        with self._at_work():
            reload.initialize_layerwise_reload(target)
        super().__init__(target, config)  # now by the names of what is loaded, without scales
        self._names -= tied

    def load(self, named: Named) -> None:
        """Quantise the layers that these tensors complete; others' tensors are kept meanwhile."""
        with self._at_work():
            super().load((name, tensor.detach().clone()) for name, tensor in named)

    def finish(self, whole: bool) -> None:
        """Quantise what is left, and let vLLM compute with the new weights."""
        self._finalize()
        super().finish(whole)

    def _finalize(self) -> None:
        with self._at_work():
            self._reload.finalize_layerwise_reload(self._target, self._config.model_config)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """vLLM's kernels are chosen by its configuration; on a CPU embeddings stay unpacked."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), patches.unpacked_weights():
            yield


def rename_mapper(target: nn.Module) -> Any:
    """vLLM's way from transformers' names to `target`'s, without fusing; None if they are alike."""
    mapper = getattr(target, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if mapper is not None else None


def _plain_name(name: str) -> str:
    """A parameter's name without vLLM's own LoRA layer around its module."""
    return name.replace(".base_layer.", ".")
