"""`python -m tasks.preprocess`: a data set as verl-compatible Parquet files with a card."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.cli.resolve import section_of_arguments
from engine.config import DataConfig
from engine.console import command_line, say
from engine.errors import ConfigError

_ABOUT = """\
Write a data set as Parquet files in verl's schema (train.parquet, validation.parquet, test.parquet:
those of the splits that the source has), with a card (README.md: rows, lengths, digests, samples,
what was left out).

  python -m tasks.preprocess --dataset gsm8k --source /data/gsm8k --local_dir data/gsm8k
  python -m tasks.preprocess --dataset problems.csv --local_dir data/mine \\
      columns.prompt=question columns.ground_truth=answer bad_rows=drop

Settings are those of a workflow's `data` section: columns, templates, system_prompt, data_source,
splits, bad_rows, max_prompt_length, decontaminate.overlap, decontaminate.against, …
Memory grows by 16 bytes per prompt.
Exit status: 0; 2 for wrong input.
"""


@command_line(2)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; what is wrong with the input is one sentence."""
    parser = argparse.ArgumentParser(
        "python -m tasks.preprocess",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, is_required, text in (
        ("--dataset", True, "gsm8k, math, or a file, a folder, s3://… or hf://ID"),
        ("--source", False, "folder of gsm8k or math; empty: the Hugging Face hub"),
        ("--local_dir", True, "folder of the files to write"),
        ("--tokenizer", False, "model folder or hub id; lengths are then in tokens"),
    ):
        parser.add_argument(name, required=is_required, default="", help=text)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="data settings")
    options = parser.parse_intermixed_args(arguments)
    from engine.data.math_problems import PRESETS, with_preset
    from engine.data.prepare import CARD, prepare
    from engine.data.tokenizer import load_tokenizer

    known = options.dataset in PRESETS
    if options.source and not known:
        raise ConfigError(
            f"--source goes with {' or '.join(PRESETS)}; give {options.dataset!r} alone"
        )
    source = {"source": "files", "path": options.source if known else options.dataset}
    config = section_of_arguments(DataConfig, "data.", options.settings, source)
    config = with_preset(config, options.dataset) if known else config
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    folder = Path(options.local_dir)
    cards = prepare(config, folder, tokenizer)
    for card in cards:
        out = ", ".join(f"{count:,} {reason}" for reason, count in card.left_out.items())
        say(f"{card.name}: {len(card.lengths):,} rows" + (f"; left out: {out}" if out else ""))
    say(f"card: {folder / CARD}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
