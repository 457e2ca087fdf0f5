"""Promotion decides which model is the champion: rules, measurements, and moves of the alias.

Read `gate` first: it judges a version against the champion and moves the alias. `rules` decides on
measurements alone. `champions` holds the lock, moves the alias and keeps the record of moves.
`__main__` is the command.
"""
