"""The settings that a checkpoint was written under, against those of the run that resumes from it.

What lives here: which of them changed, in words and for the record. What does not: which ones a
trainer lets change (`resume`, `sft`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from engine.checkpoint import Checkpoint
from engine.checkpoint.state_dict import StateDict
from engine.errors import CheckpointError

log = logging.getLogger(__name__)

_MAX_LISTED = 3  # changed settings in an error message


def flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves by dotted name, e.g. "rl.rollout.n": 8."""
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def changed_settings(
    checkpoint: Checkpoint,
    settings: Mapping[str, object],
    may_change: Collection[str],
    defaults: Mapping[str, object],
) -> list[StateDict]:
    """What changed since the run began, an entry a change: those of earlier resumptions first.

    An entry is `{"step": 40, "setting": "rl.actor.optim.lr", "before": 1.0, "after": 0.1}`. New
    ones are logged. `may_change` are names of settings, or of sections as "rl.actor.optim". A
    setting that the checkpoint's version of the engine did not have counts with its value in
    `defaults`. Raises CheckpointError where another setting has changed.
    """
    there = checkpoint.state.get("settings")
    if not isinstance(there, dict):
        raise _refused(checkpoint, "another version of the engine wrote it")
    there = {name: defaults[name] for name in settings.keys() & defaults.keys()} | there
    names = sorted(n for n in there.keys() | settings.keys() if there.get(n) != settings.get(n))
    told = {n: f"{n} is {there.get(n)!r} there and {settings.get(n)!r} here" for n in names}
    refused = [told[n] for n in names if not _is_in(n, may_change)]
    if refused:
        more = len(refused) - _MAX_LISTED
        shown = refused[:_MAX_LISTED] + ([f"{more} more"] if more > 0 else [])
        raise _refused(checkpoint, ", ".join(shown))
    if told:
        log.warning("%s: settings changed: %s", checkpoint.folder, ", ".join(told.values()))
    new = [
        {"step": checkpoint.step, "setting": n, "before": there.get(n), "after": settings.get(n)}
        for n in names
    ]
    return [*checkpoint.state.get("changed_settings", []), *new]


def _refused(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.folder} was written under other settings: {why}; resume with its settings, "
        "or give another checkpoint folder"
    )


def _is_in(name: str, may_change: Collection[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in may_change)
