"""Programs that nobody trusts, run where they can do no harm.

`run` starts a sandbox and speaks to it; in it, `guest` builds the walls (`walls`, `seccomp`) and
runs the program (`programs`). What guests import is the standard library alone, as they see nothing
else. The right answers never enter a sandbox together with a program that is judged by them.
"""
