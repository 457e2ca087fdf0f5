"""How a family's decoder is split over ranks, read from its transformers configuration.

`base_model_tp_plan` names the matrices of a layer that `tensor_parallel` splits, and
`base_model_pp_plan` what comes before and after the layers, for `pipeline_parallel`. Values only.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

from engine.errors import ConfigError

# Model types of which tests compare tp and pp with one process; tp takes others with such a plan.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt_neox"),
    *("glm4", "granite", "olmo2", "smollm3", "starcoder2"),
)

_LAYER = "layers.*."


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """Modules of a decoder by what is done with them; a layer's by their names in the layer."""

    columns: frozenset[str]  # linears whose outputs are split, e.g. "self_attn.q_proj"
    packed: frozenset[str]  # of those: queries, keys and values, or gate and up, in one matrix
    rows: frozenset[str]  # linears whose inputs are split, e.g. "mlp.down_proj"
    replicated: frozenset[str]  # blocks of which each rank computes all, e.g. "self_attn"
    before: tuple[str, ...]  # what makes hidden states of token ids, e.g. ("embed_tokens",)
    after: tuple[str, ...]  # what follows the layers, e.g. ("norm",)

    @classmethod
    def of(cls, config: object) -> Self:
        """Return the plan of a transformers configuration; raises ConfigError where it has none."""
        plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
        parts = list(getattr(config, "base_model_pp_plan", None) or ())
        by_style: dict[str, set[str]] = defaultdict(set)
        for name, style in plan.items():
            if name.startswith(_LAYER):
                by_style[style].add(name.removeprefix(_LAYER))
        if not by_style or "layers" not in parts:
            raise _no_plan(config, "transformers has no plan for it")
        gathered = by_style.pop("colwise_gather_output", set())
        packed = {name for name in gathered if name.endswith(("qkv_proj", "gate_up_proj"))}
        columns, rows = by_style.pop("colwise", set()) | gathered, by_style.pop("rowwise", set())
        rows |= by_style.pop("rowwise_split_input", set())
        by_style.pop("replicated_with_grad_allreduce", None)  # the norms of single heads
        if by_style:
            raise _no_plan(config, f"its plan has {sorted(by_style)[0]!r}")
        layers_index = parts.index("layers")
        return cls(
            columns=frozenset(columns),
            packed=frozenset(packed),
            rows=frozenset(rows),
            replicated=frozenset(_block(name) for name in gathered - packed),
            before=tuple(parts[:layers_index]),
            after=tuple(parts[layers_index + 1 :]),
        )

    @property
    def embedding(self) -> str:
        return self.before[0]

    @property
    def blocks(self) -> frozenset[str]:
        """Parts of a layer that read all tokens: attention and MLP."""
        return frozenset(_block(name) for name in self.columns)

    def covers(self, name: str) -> bool:
        """Tell whether a layer's module is a split linear, or a part of one (an adapter)."""
        return any(name == n or name.startswith(f"{n}.") for n in self.columns | self.rows)

    def computes_whole(self, name: str) -> bool:
        """Tell whether each rank computes all of the block that a layer's module `name` is in."""
        return _block(name) in self.replicated


def within_layer(name: str) -> str | None:
    """Return a module's name in its layer; None outside of the layers, "" for a layer itself.

    >>> within_layer("model.layers.3.mlp.up_proj"), within_layer("model.norm")
    ('mlp.up_proj', None)
    """
    words = name.split(".")
    for index, word in enumerate(words[:-1]):
        if word == "layers" and words[index + 1].isdecimal():
            return ".".join(words[index + 2 :])
    return None


def _block(name: str) -> str:
    return name.partition(".")[0]


def _no_plan(config: object, why: str) -> ConfigError:
    model_type = getattr(config, "model_type", type(config).__name__)
    return ConfigError(
        f"a model of type {model_type!r} has no tensor-parallel plan ({why}; there are plans for "
        f"{', '.join(FAMILIES)}); set tp=1 and shard it by fsdp"
    )
