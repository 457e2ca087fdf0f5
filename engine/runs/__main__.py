"""`python -m engine.runs`: the runs that are recorded, or what tells two or more of them apart."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from engine.console import command_line, display_path, quiet, say, table
from engine.runs.comparison import SHOWN, RunComparison, compare
from engine.runs.sources import Curve, list_runs, read_run
from engine.storage.filesystem import write_text
from engine.tracking.connection import shorten

BARS, WIDTH = "▁▂▃▄▅▆▇█", 16  # of a curve in the terminal


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if len(options.run) == 1:
        parser.error("name two runs or more to compare, or none to list what there is")
    quiet()
    _compare(options) if options.run else _list(options)
    return 0


def _list(options: argparse.Namespace) -> None:
    runs = list_runs(options.tracking_uri, options.last)
    if options.json:
        say(json.dumps(runs, indent=2))
    elif runs:
        shown = [{k: "" if v is None else v for k, v in run.items()} for run in runs]
        for run in shown:
            run["updated"] = run["updated"].partition(".")[0]
            run["mlflow_run"] = run["mlflow_run"][:8]
            run["gain"] = f"{100 * run['gain']:+.1f} points" if run["gain"] != "" else ""
        table("runs, newest first (times in UTC)", shown)
    else:
        say("no runs in $HYBRIDFLYTE_HOME (or ./outputs) and MLflow; name its --tracking-uri")


def _compare(options: argparse.Namespace) -> None:
    runs = [read_run(reference, options.tracking_uri) for reference in options.run]
    comparison = compare(runs, options.metric or SHOWN)
    page = comparison.as_page() if options.html else ""
    if options.json:
        say(json.dumps(asdict(comparison), indent=2))
    else:
        _print(comparison, options.samples)
    if options.html and options.dry_run:
        say(f"dry run: {options.html} is not written ({len(page):,} characters)", error=True)
    elif options.html:
        write_text(Path(options.html).expanduser(), page, "choose another file")
        say(display_path(Path(options.html)), error=options.json)


def _print(comparison: RunComparison, samples: int) -> None:
    for name, place in comparison.runs.items():
        say(f"{name}: {place}")
    for title, label, rows in (
        ("settings that differ", "setting", comparison.settings),
        ("metrics, first → last", "metric", {k: _draw(v) for k, v in comparison.curves.items()}),
    ):
        heads = (label, *comparison.runs)
        cells = [dict(zip(heads, (key, *row), strict=True)) for key, row in rows.items()]
        table(title, cells) if cells else say(f"{title}: none that is recorded")
    for name, pair in comparison.pairs.items():
        if isinstance(pair, str):
            say(f"{name}: no paired gain: {pair}")
            continue
        say(f"{name} over {next(iter(comparison.runs))}: {pair.sentence()}")
        for kind, flips in (("fixed", pair.fixed), ("broken", pair.broken)):
            for flip in flips[:samples]:
                prompt, *texts = (shorten(" ".join(text.split()), 60) for text in flip.values())
                say(f"  {kind}: {prompt} | {texts[1]} → {texts[2]} | right: {texts[0]}")


def _draw(curves: Sequence[Curve]) -> list[str]:
    """Draw the curves of a metric as `0.1 → 0.6 ▁▃▅█`, on one scale."""
    drawn, every_value = [], [value for curve in curves for value in curve.values()]
    low, span = min(every_value, default=0), np.ptp(every_value or [0]) or 1
    for values in (list(curve.values()) for curve in curves):
        means = [part.mean() for part in np.array_split(values, min(len(values), WIDTH) or 1)]
        bars = [BARS[round((m - low) / span * (len(BARS) - 1))] for m in means if np.isfinite(m)]
        drawn.append(f"{values[0]:.4g} → {values[-1]:.4g} {''.join(bars)}" if values else "")
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine.runs",
        description="List the runs in $HYBRIDFLYTE_HOME (or ./outputs) and MLflow; or compare two "
        "or more with the first: settings that differ, metrics, paired gain with its interval, "
        "and the held-out problems that only one of two solves.",
        epilog="exit status: 0; 1 something can't be read or written; 2 wrong usage",
    )
    add = parser.add_argument
    run = "a name in the list, a folder or s3:// address, an artifact, or an id of MLflow"
    add("run", nargs="*", metavar="RUN", help=run)
    add("--last", type=int, default=20, metavar="N", help="runs to list (default: 20)")
    metric = "metrics to show, e.g. 'actor/*'; may be repeated (default: reward, KL and the like)"
    add("--metric", action="append", metavar="PATTERN", help=metric)
    flips = "problems to print that were fixed, and that were broken (default: 3 of each)"
    add("--samples", type=int, default=3, metavar="N", help=flips)
    add("--html", metavar="FILE", help="write the comparison as a page that needs no network")
    add("--dry-run", action="store_true", help="read and compare, and write no page")
    add("--json", action="store_true", help="print JSON")
    uri = "MLflow's store (default: $MLFLOW_TRACKING_URI, or ./mlflow.db)"
    add("--tracking-uri", default="", metavar="URI", help=uri)
    return parser


if __name__ == "__main__":
    sys.exit(main())
