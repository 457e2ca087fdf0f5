"""The training loops, and what is checked before them.

Read `rl` first, the loop of reinforcement learning; `run_plan` checks and resolves its settings,
`run_spec` is what a run is made of, `rollout_modes` who waits for whom. `offline` is the loop of
training on rows: the warm start, with preferences and reward models in `preference_learning`.
"""
