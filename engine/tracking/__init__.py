"""Runs, metrics and models in MLflow, and metrics elsewhere.

Read `runs` first: the runs of a pipeline and its stages. `model_versions` holds model versions and
aliases, `connection` opens a store and turns its errors into sentences, `metric_logs` has the other
trackers. Importing this package does not import mlflow (which takes 2 s).
"""

from engine.tracking.model_versions import ModelVersion
from engine.tracking.runs import StageRun, Tracker

__all__ = ["ModelVersion", "StageRun", "Tracker"]
