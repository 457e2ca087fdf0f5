"""`python -m engine.serve MODEL`: a checked model behind an OpenAI-compatible endpoint.

`served_model` finds and checks the model; `vllm_process` starts vLLM's server for it, `native` is a
small server over the native rollout engine, with `openai_api` (what requests and answers are) and
`batching` (requests that are decoded together).
"""
