"""The sources `gsm8k` and `math`: problems with worked answers, from a folder, S3 or the hub.

GSM8K's folder has `train.jsonl` and `test.jsonl`, or Parquet files of these names, also as the hub
lays them out (`main/train-00000-of-00001.parquet`), with the columns `question` and `answer`, which
ends in `#### 28`. `math` is the source `files` with templates for MATH's columns
(arXiv:2103.03874); `PRESETS` has those of both data sets, with verl's instructions.
"""

from __future__ import annotations

import hashlib
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from engine.config import DataConfig
from engine.data.rows import brief, normalise, rl_row, sft_row
from engine.data.sources import Files, Splits, register_source
from engine.errors import DataError
from engine.storage.json_rows import Row
from engine.storage.readers import list_files, parse_rows, read_bytes

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_TIMEOUT_S = 10.0
_HUB_FILES = ["main/*", "data/*", "train*", "test*"]
SplitFiles = dict[str, list[tuple[str, bytes]]]  # split → (URI, content) of its files


@register_source("gsm8k")
class GSM8K:
    """`data.source=gsm8k`, read from `data.path`."""

    def digest(self, config: DataConfig, seed: int) -> str:
        """SHA-256 of the bytes of the files that are read, and of which split each belongs to."""
        return _digest(_read_files(config.path))

    def load(self, config: DataConfig, seed: int) -> Splits:
        """SFT and RL share the training rows; `seed` chooses which of them are for validation."""
        files = _read_files(config.path)
        first: dict[str, Row] = {}  # of equal questions, so that none is in two splits
        for problem in _problems(files["train"]):
            first.setdefault(normalise(problem["question"]), problem)
        pool = list(first.values())
        random.Random(f"gsm8k/{seed}").shuffle(pool)
        held_out = min(config.validation_size, len(pool) // 5)
        if held_out == 0:
            raise DataError(
                f"{config.path}: {len(pool)} distinct training problems are too few to take a "
                "validation split from; give at least 5"
            )
        validation, train = pool[:held_out], pool[held_out:]
        test = _problems(files["test"])[: config.test_size]
        return Splits(
            sft_train=_sft_frame(train[: config.sft_size], "sft_train"),
            sft_validation=_sft_frame(validation, "sft_validation"),
            train=_rl_frame(train[: config.train_size], "train"),
            validation=_rl_frame(validation, "validation"),
            test=_rl_frame(test, "test"),
            source_digest=_digest(files),
            source_uri=config.path,
        )


def _read_files(path: str) -> SplitFiles:
    """Read the files of each split: one JSONL, or all its Parquet shards, in order."""
    folder, files = _locate(path), SplitFiles()
    for split in ("train", "test"):
        shard = re.compile(rf"{split}(-\d+-of-\d+)?\.parquet")
        for base in (folder, f"{folder}/main", f"{folder}/data"):
            names = {uri: uri.rpartition("/")[2] for uri in sorted(list_files(base))}
            uris = [uri for uri, name in names.items() if name == f"{split}.jsonl"]
            uris = uris or [uri for uri, name in names.items() if shard.fullmatch(name)]
            if uris:
                files[split] = [(uri, read_bytes(uri)) for uri in uris]
                break
        else:
            raise DataError(
                f"data.path={path!r} has no {split}.jsonl and no {split}*.parquet (looked in it, "
                "in main/ and in data/); give a folder that holds GSM8K's train and test files"
            )
    return files


def _locate(path: str) -> str:
    """Return the folder or URL to read: `path` itself, or where a hub id was downloaded to."""
    if not path:
        raise DataError(
            "data.path is empty; with data.source=gsm8k give a folder, an s3:// prefix or a hub id "
            "such as openai/gsm8k"
        )
    if "://" in path:
        return path.rstrip("/")
    if Path(path).is_dir():
        return str(Path(path).resolve())
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
        HfApi().dataset_info(hub_id, timeout=_HUB_TIMEOUT_S)
        return fetch(etag_timeout=_HUB_TIMEOUT_S, max_workers=2)
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


def _digest(files: SplitFiles) -> str:
    """SHA-256 over each file's content and the split that it belongs to."""
    contents = [
        f"{split}\0{hashlib.sha256(data).hexdigest()}"
        for split in files
        for _, data in files[split]
    ]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def _problems(files: list[tuple[str, bytes]]) -> list[Row]:
    """Return question, answer, ground truth and row number (from 0) of every row of a split."""
    problems: list[Row] = []
    for uri, data in files:
        for number, row in enumerate(parse_rows(data, uri), start=1):
            for column in ("question", "answer"):
                if not isinstance(row.get(column), str) or not row[column].strip():
                    raise DataError(
                        f"{uri}, row {number}: column {column!r} must be text, got "
                        f"{brief(row.get(column))}; its columns are {sorted(row)}"
                    )
            truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
            if "####" not in row["answer"] or not truth:
                raise DataError(
                    f"{uri}, row {number}: the answer has no '#### <number>', so there is no "
                    "ground truth; correct the row"
                )
            problems.append({**row, "ground_truth": truth, "index": len(problems)})
    return problems


def _rl_frame(problems: list[Row], split: str) -> pd.DataFrame:
    return pd.DataFrame(
        [rl_row("gsm8k", p["question"], p["ground_truth"], _extra(p, split)) for p in problems]
    )


def _sft_frame(problems: list[Row], split: str) -> pd.DataFrame:
    extra = {"style": "worked"}
    return pd.DataFrame(
        [sft_row(p["question"], p["answer"], extra | _extra(p, split)) for p in problems]
    )


def _extra(problem: Row, split: str) -> dict[str, object]:
    return {"kind": "gsm8k", "index": problem["index"], "split": split}


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
        """SHA-256 as of the source `files`."""
        return Files().digest(with_preset(config, "math"), seed)

    def load(self, config: DataConfig, seed: int) -> Splits:
        """Load as `files` does: splits by the names of files, ground truths from `\\boxed{…}`."""
        return Files().load(with_preset(config, "math"), seed)
