"""The single controller: groups of workers, futures between them, and where they are placed."""
