"""Transfer of a policy's weights to processes with a copy of it: in full, or as a delta."""
