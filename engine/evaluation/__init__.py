"""Evaluation measures a model, compares it with another one, and shows both on a page.

Read `scoring` first: it decodes a split (`decode`), judges the completions by the run's scorer and
makes the table of `results`. `summary` compares two tables with the intervals of `metrics`, and
`report_page` shows that as HTML, with the pictures of `plots`. `comparability` says what two
evaluations must share, `policy_steps` reads the RL run behind a model, `lm_eval` runs the
lm-evaluation-harness.
"""
