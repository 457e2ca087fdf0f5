"""Samples of a policy's completions: `python -m engine.samples FOLDER` shows them.

`writer` picks groups of a step's batch and writes them beside training, `sample_files` has the
Parquet files of a run, `viewer` makes the page.
"""
