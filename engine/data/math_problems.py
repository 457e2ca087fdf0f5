"""The source `math`, and what GSM8K and MATH (arXiv:2103.03874) look like as rows of verl.

Both are settings of the source `files`: templates over the columns of their files, which lie in a
folder, S3 or on the hub.
"""

from __future__ import annotations

from typing import Any

from engine.config import DataConfig
from engine.data.files import Files
from engine.data.sources import Splits, register_source

# The instructions are verl's, so that models and rewards find what they know.
PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "path": "hf://openai/gsm8k:main",
        "data_source": "openai/gsm8k",
        "templates": {
            "prompt": "{{ question }} Let's think step by step and output the final answer after "
            '"####".',
            "ground_truth": "{{ (answer | required('####')).rpartition('####')[2] | trim "
            "| replace(',', '') }}",
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
    return config.model_copy(
        update={
            "source": "files",
            "path": config.path or preset["path"],
            "data_source": config.data_source or preset["data_source"],
            "templates": {**preset["templates"], **config.templates},
        }
    )


@register_source("math")
class Math:
    """`data.source=math`: files with `problem` and `solution`, from `data.path` or the hub."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """As that of the source `files`."""
        return Files().digest(with_preset(config, "math"), seed)

    def load(self, config: DataConfig, seed: int) -> Splits:
        """As the source `files`: splits by the names of files, ground truths from `\\boxed{…}`."""
        return Files().load(with_preset(config, "math"), seed)
