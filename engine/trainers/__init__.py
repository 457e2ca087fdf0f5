"""Training loops: the warm start and reinforcement learning."""
