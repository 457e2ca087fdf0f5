"""The environments that are shipped, one a module."""
