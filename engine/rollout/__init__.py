"""Rollout: prompts in, sampled completions with their log-probs out.

Read `protocol` first: it has what every engine takes and gives, and the registry of engines. The
engines are folders: `native` (the trainer's own weights), `vllm`, and `server` (over HTTP).
`stream` has rollout without end, `sampling` the draw of tokens by a noise that repeats in every
engine.
"""
