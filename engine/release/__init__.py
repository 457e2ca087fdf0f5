"""A model on its way out: what is known of it, its card, and the folder or repository it goes to.

`model` reads and checks its lineage, `base` finds what it was trained from and under which licence,
`card` writes that down, `folder` and `hub` deliver. The command is `engine.export`.
"""
