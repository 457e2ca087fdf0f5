"""Published module names: `engine.utils.health_check`."""
