"""From a source to rows, tokens and batches: readers, tokenizer, templates, loaders."""
