"""The sources `gsm8k` and `math`: the source `files` with templates for these data sets.

GSM8K's rows have `question` and `answer`, which ends in `#### 28`; MATH's (arXiv:2103.03874) have
`problem` and `solution`. `PRESETS` has verl's instructions; the source `gsm8k` asks without any.
"""

from pathlib import Path
from typing import Any

from engine.config import DataConfig
from engine.data.sources import Files, register_source

PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "path": "hf://openai/gsm8k:main",
        "data_source": "openai/gsm8k",
        "templates": {
            "prompt": "{{ question }} Let's think step by step and output the final answer after "
            '"####".',
            "ground_truth": "{{ (answer | required('####')).rpartition('####')[2] | number }}",
            "response": "{{ answer }}",
            "ability": "math",
        },
    },
    "math": {
        "path": "hf://DigitalLearningGmbH/MATH-lighteval",
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "templates": {
            "prompt": "{{ problem }} Let's think step by step and output the final answer within "
            "\\boxed{}.",
            "ground_truth": "{{ solution | boxed }}",
            "response": "{{ solution }}",
            "ability": "math",
        },
    },
}


def with_preset(config: DataConfig, name: str) -> DataConfig:
    """Settings of `files` that read the data set `name`; what `config` sets stays."""
    preset = PRESETS[name]
    update = {name: getattr(config, name) or preset[name] for name in ("path", "data_source")}
    update |= {"source": "files", "templates": {**preset["templates"], **config.templates}}
    return config.model_copy(update=update)


@register_source("math")
class Math(Files):
    """`data.source=math`: files with `problem` and `solution`, from `data.path` or the hub."""

    def settings(self, config: DataConfig) -> DataConfig:
        return with_preset(config, "math")


@register_source("gsm8k")
class GSM8K(Files):
    """`data.source=gsm8k`: files with `question` and `answer`, from `data.path` or the hub."""

    def settings(self, config: DataConfig) -> DataConfig:
        update: dict[str, Any] = {"data_source": config.data_source or "gsm8k"}
        update["templates"] = {"prompt": "{{ question }}", **config.templates}
        if config.path == "openai/gsm8k" and not Path(config.path).exists():
            update["path"] = ""  # the preset's, which names one of its two subsets
        return with_preset(config.model_copy(update=update), "gsm8k")
