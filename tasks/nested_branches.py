"""Where flytekit's local runs need help: a branch inside the sub-workflow of another branch.

Locally, the inner branch shares the outer one's state. It marks it as done when it ends, so that
what follows in the sub-workflow is left out, and it runs its first case whether chosen or not. On a
cluster each has its own. Not here: types (`tasks.literal_types`).
"""

from __future__ import annotations

from typing import Any

from flytekit.core.context_manager import BranchEvalMode, FlyteContext


def nest_branches() -> None:
    """Give a branch in a running branch a state of its own; again has no effect."""
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
