"""A model on its way out: what is known of it, its card, and the folder or repository it goes to.

`model` reads and checks its lineage, evaluation and base; `model_folder` writes that down and
delivers it, and is the one to read first. The command is `engine.export`.
"""
