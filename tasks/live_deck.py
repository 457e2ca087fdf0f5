"""A Deck that can be read while its task runs.

flytekit publishes a task's Decks when it ends, and before that whenever `Deck.publish` is called:
Flyte's console reads the file again when it is opened. flytekit keeps its context by thread and
leaves each published copy in the task's local sandbox; here it is published from a thread of the
engine's, through a sandbox that is removed.
"""

from __future__ import annotations

import tempfile
import time

from flytekit import Deck, FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from tasks.context import on_cluster

PUBLISH_SECONDS = 60.0  # between two uploads; a Deck has a few megabytes


class LiveDeck(Deck):
    """A tab whose page is replaced while the task runs; made in the task's own thread."""

    def __init__(self, name: str) -> None:
        self._page = ""
        self._context = FlyteContextManager.current_context()
        self._live = on_cluster()  # elsewhere the page's own file can be opened
        self._due = 0.0  # of time.monotonic
        super().__init__(name)

    @property
    def html(self) -> str:
        """What the tab shows."""
        return self._page

    def show(self, page: str) -> None:
        """Replace the page, and upload the Decks where that is due; from any thread."""
        self._page = page
        if self._live and time.monotonic() >= self._due:
            self._publish()
            self._due = time.monotonic() + PUBLISH_SECONDS

    def _publish(self) -> None:
        FlyteContextManager.current_context()  # makes this thread a stack of contexts
        access = self._context.file_access
        with tempfile.TemporaryDirectory(prefix="deck-") as place:
            own = FileAccessProvider(place, access.raw_output_prefix, access.data_config)
            with FlyteContextManager.with_context(self._context.with_file_access(own)):
                Deck.publish()  # logs what goes wrong, and raises nothing
