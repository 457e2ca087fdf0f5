"""A policy's weights on their way to processes with copies of it: whole, or what changed."""
