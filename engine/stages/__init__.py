"""The stages of a pipeline as plain functions: run, settings and inputs → artifact.

A stage reads the artifacts of stages before it, computes with the rest of the engine, and publishes
an artifact with a manifest. It knows no workflow engine: `tasks/` makes Flyte tasks of these
functions. Read `stage.py` first (the frame that all share), then `training.py`.

Modules of computing stages import what they need at the top, torch included, so whoever only
describes a pipeline imports `settings` and `profiles`.
"""
