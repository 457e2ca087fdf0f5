"""The command line of a reinforcement-learning run, `python -m engine.main_ppo`, in parts.

`settings` is the configuration, `keys` and `absent` are the tables of verl's names, `convert` and
`resolve` go from what was typed to the configuration, `show` prints it, `run` does the run.
"""
