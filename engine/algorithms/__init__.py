"""Algorithms as pure functions: tensors in, tensors out.

What lives here: advantage estimators, policy losses, KL, correction, shaping, preference losses.
What does not: models, sampling, optimizers, configuration files. Of the engine, only `errors` and
`registry` are imported. Nothing reads a clock or a file, and only KL controllers have state.

Notation everywhere: tensors `[B, T]` (B completions, T response columns), m = response_mask,
r = token-level rewards, S = sum of a completion's rewards, g = group of one prompt's completions.
"""
