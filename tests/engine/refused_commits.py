"""Storage that refuses to commit checkpoints of certain steps."""

from __future__ import annotations

import pytest

from engine.checkpoint import Checkpoint, CheckpointStore
from engine.checkpoint.store import CheckpointDraft
from engine.storage.folder import CheckpointStorageError


def refuse_commits(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> None:
    """Refuse the commit of a step as often as `steps` names it; each refusal takes one off."""
    commit = CheckpointStore.commit

    def refusing(self: CheckpointStore, draft: CheckpointDraft) -> Checkpoint:
        if draft.step in steps:
            steps.remove(draft.step)
            raise CheckpointStorageError(f"S3 refused step {draft.step}")
        return commit(self, draft)

    monkeypatch.setattr(CheckpointStore, "commit", refusing)
