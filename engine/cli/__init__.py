"""The command line of a reinforcement-learning run, `python -m engine.main_ppo`, in parts.

`settings` is the configuration, `renamed_keys` and `unsupported_keys` are the tables of verl's
names, `resolve` turns arguments into the configuration, `help_text` prints it, `run` does the run.
"""
