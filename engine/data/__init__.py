"""From a source to rows, tokens and batches. Read `sources` first: `load_splits` is the front door.

- `sources` has the registry and `files`; `word_problems` and `math_problems` are other sources.
- `row_files` reads rows of files and hub datasets, `rows` says what a row is, `contract` checks
  tables, `decontamination` leaves rows out, `incremental_data` finds those of retraining, `prepare`
  writes Parquet and a card.
- `templates` and `tokenizer` turn text into tokens, `training_examples` and `preference_rows` rows
  of files into examples.
- `loader` and `order` draw prompts batch by batch, `collate` pads them.
"""
