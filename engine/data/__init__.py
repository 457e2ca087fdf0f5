"""From a source to rows, tokens and batches. Read `sources` first, whose door is `load_splits`."""
