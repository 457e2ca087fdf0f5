"""The gate: judge a version against the present champion, and move the alias where it passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import ChampionChangedError
from engine.promotion.champion_evaluation import champion_to_compare
from engine.promotion.champions import Champions
from engine.promotion.rules import Decision

if TYPE_CHECKING:
    from engine.tracking import Tracker
    from engine.tracking.registry import ModelVersion

DECISIONS = 5  # of one promotion, while others promote in between


def decide_and_move(
    tracker: Tracker,
    champions: Champions,
    version: ModelVersion,
    judge: Callable[[ModelVersion | None], Decision],
    *,
    request: str,
    by: str,
    approved_by: str = "",
    notify: Callable[[str], None],
) -> tuple[Decision, ModelVersion | None]:
    """Decide on `version`, and move the alias if the decision is to promote.

    Returns the decision with the champion that it was made against (None: there was none). Where
    another promotion comes in between, it is decided again, against the new champion.

    judge: compares the version with a champion; called once a decision.
    request: what makes a second call with it the same request, which moves nothing.
    notify: is told the outcome, a sentence.
    Raises ChampionChangedError when others promoted during each of `DECISIONS` decisions.
    """
    name, alias = f"{version.name} version {version.version}", champions.alias
    digest = version.tags["artifact_digest"]
    for left in reversed(range(DECISIONS)):
        former = champion_to_compare(tracker, champions, request)
        if former is not None and former.tags.get("artifact_digest") == digest:
            reason = f"{name} is the {alias} already"
            notify(reason)
            return Decision(False, reason, ()), former
        decision = judge(former)
        if not decision.promote:
            break
        try:
            champions.promote(
                version.version,
                former.version if former else None,
                decision.reason,
                request=request,
                by=by,
                approved_by=approved_by,
            )
            break
        except ChampionChangedError as error:
            if not left:
                raise
            notify(f"decided again: {error}")
    done = "is now" if decision.promote else "was not made"
    notify(f"{name} {done} {alias}: {decision.reason}")
    return decision, former
