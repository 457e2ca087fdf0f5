"""An update of a live vLLM model by vLLM's own loaders: whole tensors in, this rank's shards kept.

Plain weights are copied in place. Weights that vLLM quantises are loaded layer by layer and copied
to where the old ones were, so that CUDA graphs stay valid. LoRA adapters can be vLLM's own.

One storage is shared with the trainer's model where layouts allow it. vLLM fuses some matrices (q,
k and v; gate and up) by stacking rows and pads vocabularies with rows, so each trainer parameter
can be a run of rows of a vLLM parameter: `share` makes it point there, and optimizer steps in place
then need no copy at all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import RolloutError
from engine.rollout.vllm import patches
from engine.rollout.vllm.vllm_types import ModelRunner

Named = Iterable[tuple[str, Tensor]]


def begin_load(runner: ModelRunner) -> WeightLoad:
    """Begin an update of the model of one of vLLM's workers."""
    config = runner.vllm_config
    load_class = WeightLoad if config.model_config.quantization is None else QuantizedLoad
    return load_class(runner.get_model(), config)


class WeightLoad:
    """One update, in as many calls of `load` as it takes, then `finish`."""

    def __init__(self, target: nn.Module, config: Any) -> None:
        """Begin an update of vLLM's model `target`, which was made by `config`."""
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

    def finish(self, complete: bool) -> None:
        """End the update; with `complete`, raise RolloutError if a parameter or part is missing."""
        missing = self._unfilled(self._loaded) if complete and self._loaded is not None else ()
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
        loaded_names = {_plain_name(name) for name in loaded}
        missing = {name for name in self._names if _plain_name(name) not in loaded_names}
        parts: dict[str, list[str]] = getattr(self._target, "packed_modules_mapping", {})
        for plain in {_plain_name(name) for name in self._names} - self._sent:
            entries = plain.split(".")
            for at, piece in enumerate(entries):
                before, after = entries[:at], entries[at + 1 :]
                sources = {".".join([*before, part, *after]) for part in parts.get(piece, ())}
                missing |= sources - self._sent
        return missing


class QuantizedLoad(WeightLoad):
    """An update of a model that vLLM quantises, from tensors that are not quantised."""

    def __init__(self, target: nn.Module, config: Any) -> None:
        from vllm.model_executor.model_loader import reload

        self._reload = reload
        self._config = config
        self._target = target
        self._finalize()  # what an update that failed has left
        parameters = dict(target.named_parameters(remove_duplicate=False))
        tied = parameters.keys() - dict(target.named_parameters()).keys()  # tied again at the end
        with self._at_work():
            reload.initialize_layerwise_reload(target)
        super().__init__(target, config)  # now by the names of what is loaded, without scales
        self._names -= tied

    def load(self, named: Named) -> None:
        """Quantise the layers that these tensors complete; others' tensors are kept meanwhile."""
        with self._at_work():
            super().load((name, tensor.detach().clone()) for name, tensor in named)

    def finish(self, complete: bool) -> None:
        """Quantise what is left, and let vLLM compute with the new weights."""
        self._finalize()
        super().finish(complete)

    def _finalize(self) -> None:
        with self._at_work():
            self._reload.finalize_layerwise_reload(self._target, self._config.model_config)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Set vLLM's configuration, which chooses kernels; on a CPU embeddings stay unpacked."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config), patches.weights_unpacked():
            yield


class StagedWeights:
    """A copy of a vLLM model's parameters on the host, pinned, which its own loaders can fill."""

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[nn.Parameter, Tensor] = {}
        self.module = self._copy(model)

    def copy_to(self, model: nn.Module) -> None:
        """Copy all to `model`'s parameters, in place."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self._copies[parameter], non_blocking=True)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def _copy(self, module: nn.Module) -> nn.Module:
        """A module with copies for its parameters and modules; all else is shared."""
        new = copy.copy(module)
        new._modules = {n: m if m is None else self._copy(m) for n, m in module._modules.items()}
        new._parameters = {n: self._host(p) for n, p in module._parameters.items()}
        return new

    def _host(self, parameter: nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        if parameter not in self._copies:  # tied ones have one
            data = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            new = Tensor._make_subclass(type(parameter), data)  # has vLLM's methods for loading
            new.__dict__.update(parameter.__dict__)
            self._copies[parameter] = new
        return self._copies[parameter]


def rename_mapper(target: nn.Module) -> Any:
    """Return vLLM's map of transformers' names to `target`'s, without fusing; None: the same."""
    mapper = getattr(target, "hf_to_vllm_mapper", None)
    return mapper and mapper.get_rename_mapper()


def _plain_name(name: str) -> str:
    """A parameter's name without a LoRA layer around its module, the trainer's or vLLM's."""
    return name.replace(".base_layer.", ".")


ADAPTER_ID = 1


def lora_request() -> object:
    """Return the argument of a vLLM request that is decoded with the adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "held in memory")


def load_adapter(worker: Any, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Make `tensors` (peft's names) a vLLM worker's adapter; RolloutError if vLLM can't."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager
    inner = manager._adapter_manager
    try:
        helper = PEFTHelper.from_dict(config)
        helper.validate_legal(manager.lora_config)
        lora = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=rename_mapper(inner.model),
        )
    except (ValueError, RuntimeError, TypeError) as error:
        raise RolloutError(
            f"vLLM can't take the adapter: {error}; set rollout.lora=merged"
        ) from error
    unknown = []
    for name in lora.loras:
        owner, _, last = name.rpartition(".")
        fused_names = [n for n, parts in inner.packed_modules_mapping.items() if last in parts]
        homes = {f"{owner}.{piece}".lstrip(".") for piece in (last, *fused_names)}
        if homes.isdisjoint(inner.modules):
            unknown.append(name)
    if unknown:
        raise RolloutError(
            f"vLLM can't adapt the modules {sorted(unknown)[:3]}; set rollout.lora=merged"
        )
    inner.remove_adapter(ADAPTER_ID)
    inner.add_adapter(lora)
    inner.activate_adapter(ADAPTER_ID)
    for module in inner.model.modules():  # ranks' order of the vocabulary, which sleep throws away
        if hasattr(module, "reset_sharded_to_full_mapping"):
            module.reset_sharded_to_full_mapping()


def plan_sharing(model: nn.Module, target: nn.Module) -> dict[str, Tensor] | None:
    """Map each trainer parameter to the rows of vLLM's parameter that it can be; None if any can't.

    Call it after an update: a run of rows counts only if vLLM's own loader has put the very same
    numbers there. Every row of every vLLM parameter must have one owner, but for padding. Adapters
    are left out: vLLM has them padded and in a dtype of its own.
    """
    packed: dict[str, list[str]] = getattr(target, "packed_modules_mapping", {})
    fused = {part: name for name, parts in packed.items() for part in parts}
    parameters = {_plain_name(name): parameter for name, parameter in target.named_parameters()}
    filled = dict.fromkeys(parameters, 0)
    views: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        plain, data = _plain_name(name), parameter.data
        home = ".".join(fused.get(piece, piece) for piece in plain.split("."))
        if home not in parameters or type(data) is not Tensor:
            return None
        start = filled[home]
        filled[home] = start + data.shape[0]
        view = parameters[home].data[start : filled[home]]
        alike = (view.shape, view.dtype) == (data.shape, data.dtype)
        if not alike or data.device not in (view.device, torch.device("cpu")):
            return None
        if not torch.equal(view, data.to(view.device)):
            return None
        views[name] = view
    for home, target_parameter in parameters.items():
        padded = "embed_tokens" in home or "lm_head" in home
        if filled[home] != target_parameter.shape[0] and not (padded and filled[home]):
            return None
    return views


def share(model: nn.Module, views: dict[str, Tensor]) -> None:
    """Make the trainer's parameters `views`, which hold the same numbers."""
    for name, view in views.items():
        model.get_parameter(name).data = view


@contextmanager
def base_on_host(model: nn.Module) -> Iterator[None]:
    """Keep all of `model` but its adapters in the machine's memory while vLLM starts.

    A device with room for one base need not have room for the two that there are until vLLM's is
    shared. What is not shared when the block ends goes back.
    """
    frozen = [(p, p.device) for name, p in model.named_parameters() if ".lora_" not in name]
    for parameter, _ in frozen:
        parameter.data = parameter.data.cpu()
    try:
        yield
    finally:
        for parameter, device in frozen:
            parameter.data = parameter.data.to(device)


class ParameterSnapshot:
    """The parameter objects and addresses of a model; checking them costs microseconds.

    A walk over the model's names costs more than all the rest of a switch, so the check reads the
    modules' own tables of parameters and submodules.
    """

    def __init__(self, model: nn.Module) -> None:
        tables = [
            table for module in model.modules() for table in (module._parameters, module._modules)
        ]
        self._sizes = [(table, len(table)) for table in tables]
        self._objects = [(table, name, value) for table in tables for name, value in table.items()]
        self._storage = [(parameter, parameter.data_ptr()) for parameter in model.parameters()]

    def is_current(self) -> bool:
        """Whether all are the same objects, no more and no fewer, on the same storage."""
        return (
            all(len(table) == size for table, size in self._sizes)
            and all(table.get(name) is value for table, name, value in self._objects)
            and all(parameter.data_ptr() == address for parameter, address in self._storage)
        )


def release(model: nn.Module, views: dict[str, Tensor]) -> None:
    """Give the trainer's parameters storage of their own again."""
    for name, parameter in model.named_parameters():
        if name in views and parameter.data_ptr() == views[name].data_ptr():
            parameter.data = parameter.data.clone()
