"""Task `rollback`: moves the alias back to the previous champion, or to a given version.

Artifact `rollback`: `rollback.json`, the move with its reason; its parents are the restored model
and the replaced one. `python -m engine.promotion rollback` does the same.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from flytekit import current_context, task
from flytekit.types.directory import FlyteDirectory

from engine.console import display_path
from tasks.context import IMAGE, SMALL, as_output, echo, on_cluster, user_facing_errors
from tasks.credentials import with_secrets
from tasks.decks import DECK, show_facts

if TYPE_CHECKING:
    from engine.storage.manifest import Parent
    from engine.tracking import Tracker


@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets(),
    retries=2,
    timeout=timedelta(hours=1),
    **DECK,
)
def rollback(
    model_name: str,
    reason: str,
    to: str = "",
    expected: str = "",
    alias: str = "champion",
    forced: bool = False,
    approved_by: str = "",
    request: str = "",
) -> FlyteDirectory:
    """Restore a champion.

    Args:
        model_name: The registered model.
        reason: Why; it is recorded.
        to: The version to restore; empty: the one that the present champion replaced.
        expected: Refuse unless this version is the champion; empty: whichever is.
        alias: The alias to move.
        forced: Take `to` even if it never was champion; recorded as forced, not as a rollback.
        approved_by: Who agrees, where approval is required and the version has none.
        request: A second call with this id changes nothing; empty: the Flyte execution.
    """
    from engine.promotion import Champions
    from engine.storage.artifacts import publish, staging
    from engine.storage.manifest import Draft
    from engine.tracking import Tracker

    with user_facing_errors():
        execution = current_context().execution_id.name if on_cluster() else ""
        request = request or execution or f"local-{uuid.uuid4().hex[:12]}"
        tracker = Tracker()
        move = Champions(tracker, model_name, alias).rollback(
            reason,
            to=to,
            expected=expected,
            request=request,
            by=execution or "local",
            force=forced,
            approved_by=approved_by,
        )
        echo(f"rollback: {model_name} {alias}: {move.sentence()}")
        show_facts("Rollback", {"model": model_name, "alias": alias, "move": move.sentence()})
        parents = [
            parent
            for name, version in (("restored", move.version), ("left", move.replaced))
            if version is not None
            for parent in parent_of_version(tracker, model_name, version, name)
        ]
        with staging("rollback") as folder:
            (folder / "rollback.json").write_text(
                json.dumps({"model_name": model_name, "alias": alias, **asdict(move)}, indent=2)
            )
            settings = {"model_name": model_name, "alias": alias, "to": to, "reason": reason}
            draft = Draft(
                kind="rollback",
                parents=tuple(parents),
                config=settings,
                flyte_execution=execution,
            )
            path = publish(folder, draft)
        echo(f"rollback: done → {display_path(path)}")
        return as_output(path)


def parent_of_version(tracker: Tracker, model: str, version: str, name: str) -> list[Parent]:
    """The artifact of a version as a parent; empty when the version or its tags are gone."""
    from engine.errors import TrackingError
    from engine.promotion.champion_evaluation import version_parent

    try:
        parent = version_parent(tracker.model_version(f"models:/{model}/{version}"), name)
    except TrackingError as error:
        # The alias has moved by now; a record without this parent is better than none.
        echo(f"rollback: {error}")
        return []
    return [] if parent is None else [parent]
