"""Samples of a policy's completions: `python -m engine.samples FOLDER` shows them."""
