"""Preferences made of a policy's own completions, and what a learned reward does to a policy."""
