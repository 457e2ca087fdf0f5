"""`python -m engine.replay FOLDER`: run a recorded RL step again, and compare its metrics."""

import argparse
import pdb
import sys
from collections.abc import Sequence

from engine.console import command_line, say
from engine.errors import CheckpointError, counted
from engine.trainers.step_record import StepRecord, compare, read_record, replay

_OTHER_LAYOUT = 1e-3  # relative: sums over ranks come in another order
_ALWAYS_SHOWN = ("loss", "grad_norm")  # ends of names


@command_line(2)
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    record = read_record(options.folder)
    alike, tolerance = options.on_ranks or record.ranks == 1, options.tolerance
    if tolerance is None:
        tolerance = 0.0 if alike else _OTHER_LAYOUT
    where = "as many" if record.ranks > 1 and alike else "one"
    say(f"step {record.step}, recorded on {counted(record.ranks, 'rank')}, run again on {where}")
    config = record.config
    rows = config.trainer.train_batch_size * config.rollout.n
    sizes = (config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    if not alike and any(0 < size < rows for size in sizes):
        say("note: ranks draw mini-batches of their own rows, one rank others; see --on-ranks")
    try:
        metrics = replay(record, options.model, options.threads, on_ranks=options.on_ranks)
    except Exception as error:
        return _failed(record, error, options.pdb)
    compared = compare(record, metrics)
    differ = [metric for metric in compared if not metric.same(tolerance)]
    for metric in compared:
        name, mark = metric.name, "  differs" if metric in differ else ""
        if mark or options.all or record.error or name.endswith(_ALWAYS_SHOWN):
            say(f"  {name:<32} {metric.recorded!r:>24} {metric.replayed!r:>24}{mark}")
    if record.error:
        say(f"different: the recorded step failed ({record.error}), this one did not")
        return 1
    exactly = "to the bit" if not tolerance else f"within {tolerance:g}"
    if differ:
        say(f"different: {len(differ)} of {len(compared)} metrics, {exactly}")
        return 1
    say(f"same: {len(compared)} metrics, {exactly}")
    return 0


def _failed(record: StepRecord, error: Exception, post_mortem: bool) -> int:
    """Say how a replay failed; as recorded, that is status 0."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    named = record.error.partition(":")[0]  # another rank's error has another text
    same = text == record.error or (record.ranks > 1 and type(error).__name__ == named)
    if isinstance(error, CheckpointError) and not same:
        say(f"error: {error}", error=True)
        return 2
    say(f"{'same: it fails as recorded' if same else 'different: it fails'}: {text}")
    if post_mortem:
        cause: BaseException = error
        while cause.__cause__ is not None and cause.__cause__.__traceback__ is not None:
            cause = cause.__cause__
        pdb.post_mortem(cause.__traceback__)
    return 0 if same else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m engine.replay",
        description="Run a recorded RL step again in one process, and compare its metrics.",
        epilog="exit status: 0 as recorded; 1 something differs; 2 no good record",
    )
    add = parser.add_argument
    add("folder", help="a record, e.g. out/checkpoints/recorded/step_3")
    add("--all", action="store_true", help="show all metrics, not what differs")
    add("--pdb", action="store_true", help="open pdb where the step fails")
    add("--on-ranks", action="store_true", help="on as many ranks as recorded, by Ray")
    add("--model", default="", help="the start model, if it is elsewhere now")
    add("--threads", type=int, default=0, help="CPU threads; default: as recorded")
    tolerance = f"relative difference that is none; default: 0, {_OTHER_LAYOUT:g} for several ranks"
    add("--tolerance", type=float, help=tolerance)
    return parser


if __name__ == "__main__":
    sys.exit(main())
