"""`python -m engine.reward_audit NAME|FILE`: whether a scorer can be fooled."""

import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

import yaml

from engine.cli.program import ArgumentParser
from engine.cli.resolve import section_of_arguments
from engine.cli.reward_file import reward_name
from engine.config import RewardConfig
from engine.config.data import RowsConfig
from engine.console import command_line, quiet, say, table
from engine.errors import ConfigError
from engine.registry import import_plugins

_ABOUT = """\
Audit a scorer: a battery of completions that hedge, hide or repeat the right answer, or have none,
on rows of your data; then the same input twice, in other order and in other batches, a second
grader, time and memory.

  python -m engine.reward_audit answer_match
  python -m engine.reward_audit my_rewards:score --data train.parquet
  python -m engine.reward_audit rewards.py::compute_score --data problems.csv \\
      columns.prompt=question columns.ground_truth=answer bad_rows=drop
  python -m engine.reward_audit judge --option url=http://judge:8000 --data train.parquet --json
"""


@command_line(2)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(
        "python -m engine.reward_audit",
        description=_ABOUT,
        epilog="exit status: 0 passed; 1 holes were found; 2 wrong input",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("reward", metavar="NAME|FILE", help="name, package.module:function or FILE.py::function")
    add("--data", default="", metavar="FILE", help="RL rows (default: made-up rows, see --truths)")
    add("settings", nargs="*", metavar="key=value", help="settings of the data section")
    kinds = ("number", "letter", "latex", "text")
    add("--truths", choices=kinds, default="number", help="right answers of made-up rows")
    add("--option", action="append", default=[], metavar="NAME=YAML", help="a reward option")
    add("--plugin", action="append", default=[], metavar="MODULE", help="registers it")
    add("--form", action="append", default=[], metavar="TEXT", help="e.g. 'Result: {}'")
    add("--json", action="store_true", help="print the audit as JSON")
    quiet()
    return _audit(parser.parse_intermixed_args(arguments))


def _audit(options: Namespace) -> int:
    from engine.rewards import audit, probes  # half a second; a wrong option needs none

    name, separator, function = options.reward.partition("::")
    if separator or name.endswith(".py"):
        name = reward_name(name, function or "compute_score")
    pairs = [text.partition("=") for text in options.option]
    if wrong := next((text for text in options.option if "=" not in text), ""):
        raise ConfigError(f"--option {wrong!r} must be NAME=VALUE, e.g. method=flexible")
    config = RewardConfig(name=name, options={key: yaml.safe_load(v) for key, _, v in pairs})
    import_plugins(options.plugin)
    rows = probes.sample_rows(options.truths)
    if options.data:
        from engine.data.row_files import read_file_rows

        data = section_of_arguments(RowsConfig, "data.", options.settings, {})
        read = read_file_rows(options.data, data)
        rows = read.rows
        for note in read.notes:
            say(note, error=options.json)
    elif options.settings:
        raise ConfigError(f"{options.settings[0]} is a setting of rows; name their file by --data")
    plugins = tuple(options.plugin)
    found = audit.audit_scorer(config, audit.reward_rows(rows), plugins=plugins, forms=options.form)
    if options.json:
        print(audit.to_json({options.reward: found}))
        return int(not found.passed)
    rows_shown = [
        {"": c.severity.replace("hole", "HOLE"), "check": c.name, "found": c.found}
        for c in found.checks
    ]
    table(f"Reward audit: {options.reward}", rows_shown)
    for check in found.checks:
        if check.severity == "hole":
            example = f": {check.completion!r} where {check.truth!r} is right" * bool(check.truth)
            say(f"hole: {check.name} ({check.found}){example}", error=True)
    say(found.sentence())
    return int(not found.passed)


if __name__ == "__main__":
    sys.exit(main())
