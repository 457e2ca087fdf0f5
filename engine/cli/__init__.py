"""The command lines `python -m engine.main_…`: arguments, help, data files, and the runs.

Read `forms` first: what each program's arguments are. `resolve` makes a configuration (`settings`)
of them, and `program` does what is around every run. The runs are `ppo_program` with `rl_run`, and
`offline_run`. All programs are in `commands`.
"""
