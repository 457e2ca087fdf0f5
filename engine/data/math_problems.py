"""The sources `gsm8k` and `math`: the source `files` with templates for these data sets.

GSM8K's rows have `question` and `answer`, which ends in `#### 28`; MATH's (arXiv:2103.03874) have
`problem` and `solution`. `PRESETS` has verl's instructions for both, so that models and rewards
find what they know; the source `gsm8k` puts the bare question.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import DataConfig
from engine.data.row_files import HUB_TIMEOUT_S
from engine.data.sources import Files, register_source
from engine.errors import DataError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["main/*", "data/*", "train*", "test*"]

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
    """`data.source=gsm8k`: files with `question` and `answer`, from the folder `data.path`.

    It may be a hub id; what the hub gave before is found without it, too.
    """

    def settings(self, config: DataConfig) -> DataConfig:
        """Raise DataError for a path that is no folder, nor one that the hub gives."""
        update: dict[str, Any] = {"path": _located(config.path)}
        update["data_source"] = config.data_source or "gsm8k"
        update["templates"] = {"prompt": "{{ question }}", **config.templates}
        return with_preset(config.model_copy(update=update), "gsm8k")


def _located(path: str) -> str:
    """The folder or URL to read: `path` itself, or where a hub id was downloaded to."""
    if not path:
        raise DataError(
            "data.path is empty; with data.source=gsm8k give a folder, an s3:// prefix or a hub id "
            "such as openai/gsm8k"
        )
    if "://" in path or Path(path).is_dir():
        return path
    if Path(path).exists() or not _HUB_ID.fullmatch(path):
        raise DataError(
            f"data.path={path!r} is not a folder; give one, an s3:// prefix or a hub id"
        )
    return _download(path)


def _download(hub_id: str) -> str:
    """Fetch a dataset repository from the hub, or find it in the hub's local cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    unavailable = (OSError, HTTPError, HFValidationError)  # network, proxy, permission, unknown id
    fetch = partial(snapshot_download, hub_id, repo_type="dataset", allow_patterns=_HUB_FILES)
    disable_progress_bars()
    try:
        # Asked first because snapshot_download itself waits without end for a silent network.
        HfApi().dataset_info(hub_id, timeout=HUB_TIMEOUT_S)
        return fetch(etag_timeout=HUB_TIMEOUT_S, max_workers=2)
    except unavailable as error:
        try:
            return fetch(local_files_only=True)
        except unavailable:
            raise DataError(
                f"data.path={hub_id!r} is neither a local folder nor a dataset that the Hugging "
                f"Face hub gives us ({type(error).__name__}); download it where there is a network "
                "and give its folder"
            ) from error
    finally:
        enable_progress_bars()
