"""Samples of what a run's policy wrote: `python -m engine.rollouts FOLDER` shows them.

`sample` picks whole groups of a step's batch and makes a table of them, `token_texts` says what a
single token reads as, `files` has the Parquet files of a run, `page` and `page_data` the page,
`writer` the thread that does all of it beside training.
"""
