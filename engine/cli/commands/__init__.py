"""The programs that `python -m engine.NAME` runs; `engine` finds them by its `__path__`.

Beside the commands lie verl's published module names, `trainer` and `utils`. Code imports from the
rooms; nothing imports from here.
"""
