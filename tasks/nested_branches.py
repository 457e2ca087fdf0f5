"""Patch of flytekit's local runs: a `conditional` inside the sub-workflow of another one.

Locally, flytekit shares one state between both. The inner branch marks it as done when it ends, so
that the rest of the sub-workflow is skipped, and it always runs its first case. On a cluster each
branch has its own state.
"""

from __future__ import annotations

from typing import Any

from flytekit.core.context_manager import BranchEvalMode, FlyteContext


def patch_nested_branches() -> None:
    """Give a branch inside a running branch its own state; idempotent."""
    builder: Any = FlyteContext.Builder
    enter = builder.enter_conditional_section
    if hasattr(enter, "nests"):
        return

    def enter_own(self: Any) -> Any:
        state = self.execution_state
        running = state is not None and state.branch_eval_mode == BranchEvalMode.BRANCH_ACTIVE
        entered = enter(self)
        if running and state.is_local_execution():
            skipped = BranchEvalMode.BRANCH_SKIPPED  # until a case is chosen
            entered.execution_state = state.with_params(branch_eval_mode=skipped)
        return entered

    enter_own.nests = True  # type: ignore[attr-defined]
    builder.enter_conditional_section = enter_own
