"""Release a model with its card and lineage, into a folder or a repository of the hub.

`model` reads and checks its lineage, evaluation and base; `model_folder` writes that down and
delivers it, and is the one to read first. The command is `engine.export`.
"""
