"""Demonstration tasks, as plugins: `rl.plugins: [examples.guessing]` registers one.

Each module is a task: a data source that makes rows and demonstrations from a seed, and the
environment that its episodes are played with. A task of your own is a module like these.

`first_steps.ipynb` is a first look from Python: a model, a reward, some steps, the curves.
"""
