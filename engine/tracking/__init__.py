"""Runs, metrics and models in MLflow, and metrics elsewhere.

`connection` opens a store and turns its errors into sentences, `registry` holds model versions and
aliases, `stage` one run while it is open, `tracker` the runs of a pipeline, `values` what MLflow
accepts as parameters and metrics, `metric_logs` the other trackers. Importing this package does not
import mlflow (which takes 2 s).
"""

from engine.tracking.model_versions import ModelVersion
from engine.tracking.runs import StageRun, Tracker

__all__ = ["ModelVersion", "StageRun", "Tracker"]
