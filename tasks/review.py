"""Task `review`: the lineage of anything, as one page (also the task's Deck), checked on request.

Like `python -m engine.lineage`, but where the artifacts are: on the cluster, with its credentials.
Not cached: the content at an address may change.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

from flytekit import Deck, task
from flytekit.types.file import FlyteFile

from tasks.context import IMAGE, SMALL, StageError, echo, user_facing_errors
from tasks.credentials import with_secrets
from tasks.decks import DECK

PAGE = "lineage.html"
SHOWN_FAULTS = 5


@task(
    cache=False,
    requests=SMALL,
    container_image=IMAGE,
    **with_secrets(),
    retries=2,
    timeout=timedelta(hours=6),
    **DECK,
)
def review(artifact: str, against: str, store: str, verify_content: bool) -> FlyteFile:
    """Write the page of an artifact's lineage; fail, with the page in the Deck, on tampering.

    `against` (empty: nothing) is compared with it, and `store` (empty: the one it lies in) is
    searched. With `verify_content`, all that it was made from and that came of it is re-hashed.
    """
    from engine.lineage.audit import audit
    from engine.lineage.compare import compare
    from engine.lineage.page import render_page, write_page
    from engine.lineage.review import review as review_lineage
    from engine.storage.locations import home

    with user_facing_errors():
        names = [against, artifact] if against else [artifact]
        found = review_lineage(names, [store] if store else [])
        comparison = None
        if against:
            comparison = compare(found.graph, found.starts[0], found.starts[-1])
        checked = audit(found) if verify_content else None
        page = render_page(found, checked, comparison)
        Deck("Lineage", page)
        folder = home() / "reviews"
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="review-", dir=folder)) / PAGE
        write_page(path, page)
        for finding in checked.findings if checked else ():
            echo(f"review: {'FAULT' if finding.is_fault else 'note'}: {finding.text}")
        echo(f"review: {found.summary} → {path}")
    if checked is not None and checked.faults:
        Deck.publish()  # Flyte writes the Deck of a task that ends well
        texts = "; ".join(finding.text for finding in checked.faults[:SHOWN_FAULTS])
        more = len(checked.faults) - SHOWN_FAULTS
        raise StageError(texts + (f"; and {more} more" if more > 0 else ""))
    return FlyteFile(str(path))
