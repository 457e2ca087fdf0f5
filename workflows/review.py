"""Reviewing lineage: what made something, what came of it, what changed.

pyflyte run workflows/review.py review --artifact models:/hybridflyte-policy@champion
pyflyte run workflows/review.py review --artifact outputs/artifacts/rl/… --against outputs/…
"""

from flytekit import workflow
from flytekit.types.file import FlyteFile

from tasks.stages import review as review_task


@workflow
def review(
    artifact: str,
    against: str = "",
    store: str = "",
    verify_content: bool = True,
    require_signatures: bool = False,
) -> FlyteFile:
    """Show where something comes from and what came of it, and find tampering.

    Args:
        artifact: Artifact folder or s3:// address, checkpoint, source file, or models:/NAME@ALIAS.
        against: Another one to compare with it; empty: none.
        store: Folder or s3:// prefix to search; empty: the store that it lies in.
        verify_content: Re-hash everything, and fail when something is missing or not as recorded.
        require_signatures: Fail also when something is not signed by a key in
            $HYBRIDFLYTE_PUBLIC_KEYS.

    Returns:
        One HTML page, which is also the task's Deck.
    """
    return review_task(**locals())
