"""Scheduled retraining: where new problems arrive, and how many make a run worth its while."""

from __future__ import annotations

from pydantic import Field

from engine.config.base import Section


class RetrainConfig(Section):
    """Which new data a scheduled run ingests."""

    path: str = Field(
        "",
        description="Folder or s3:// prefix of dated folders (2026-11-20/ or dt=2026-11-20/) with "
        ".parquet or .jsonl files of RL rows",
    )
    minimum_rows: int = Field(64, ge=1, description="Fewer new problems wait for the next run")
    lookback_days: int = Field(
        30, ge=1, description="Older dated folders are not looked into, late data included"
    )
    replay: float = Field(
        0.25, ge=0, lt=1, description="Share of the prompts that the champion was trained on before"
    )
