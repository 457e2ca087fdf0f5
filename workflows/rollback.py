"""Take a champion back.

pyflyte run workflows/rollback.py rollback --model_name hybridflyte-policy --reason "…"
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from tasks.stages import rollback as rollback_task


@workflow
def rollback(
    reason: str,
    model_name: str = "hybridflyte-policy",
    to: str = "",
    expected: str = "",
    alias: str = "champion",
    forced: bool = False,  # pyflyte run has a --force of its own
    approved_by: str = "",
) -> FlyteDirectory:
    """Restore the previous champion, or a former one that is named.

    Args:
        reason: Why; it is recorded with the move.
        model_name: The registered model.
        to: The version to restore; empty: the one that the present champion replaced.
        expected: Refuse unless this version is the champion; empty: whichever is.
        alias: The alias to move.
        forced: Take `to` even if it never was champion; recorded as forced, not as a rollback.
        approved_by: Who agrees, where approval is required and the version has none.

    Returns:
        The rollback artifact: rollback.json.
    """
    return rollback_task(**locals())
