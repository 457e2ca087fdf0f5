"""The dtype of a run's models, for where they will be."""

from __future__ import annotations

from pathlib import Path

from engine.config import RLConfig
from engine.models import resolve_dtype, text_config
from engine.trainers.auto_placement import cluster_has_gpus


def model_dtype(dtype: str, model_path: str | Path, config: RLConfig) -> str:
    """The dtype of the run's models, `auto` resolved for where they will be.

    Raises ConfigError for one that `actor.parallel.compute_dtype` contradicts.
    """
    trainer, gpu = config.trainer, None
    if trainer.pools:
        gpu = any(pool.gpus > 0 for pool in trainer.pools if "actor" in pool.roles)
    elif trainer.placement == "ray":
        gpu = False
    elif trainer.placement == "auto" and dtype == "auto":
        gpu = cluster_has_gpus(config)
    width = text_config(model_path).hidden_size
    compute_dtype = config.actor.parallel.compute_dtype
    return resolve_dtype(dtype, width, gpu=gpu, compute_dtype=compute_dtype)
