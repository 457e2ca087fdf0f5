"""Published forms of this engine's classes: adapters onto `trainers`, `runtime` and `controller`.

`docs/migration.md` says for each snippet what it does here. What these adapters lack, the classes
below them have.
"""
