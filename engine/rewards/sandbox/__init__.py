"""Programs that nobody trusts, run where they can do no harm.

`run` starts a sandbox and speaks to it (read it first); in it, `guest` puts the limits of `walls`
around a process and runs one of `programs`. What guests import is the standard library alone, as
they see nothing else. The right answers never enter a sandbox together with a program that is
judged by them.
"""
