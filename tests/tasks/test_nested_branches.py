"""A branch inside the sub-workflow of a branch, run locally."""

from __future__ import annotations

from flytekit import conditional, task, workflow

from tasks.flytekit_setup import patch_nested_branches

patch_nested_branches()
ran: list[str] = []


@task
def step(name: str) -> str:
    ran.append(name)
    return name


@workflow
def inner(which: str) -> str:
    chosen = (
        conditional("inner")
        .if_(which == "a")
        .then(step(name="a"))
        .elif_(which == "b")
        .then(step(name="b"))
        .else_()
        .fail("neither")
    )
    after = step(name="after")
    chosen >> after
    return after


@workflow
def outer(go: bool, which: str) -> str:
    return (
        conditional("outer")
        .if_(go.is_true())
        .then(inner(which=which))
        .else_()
        .then(step(name="skipped"))
    )


def run(go: bool, which: str) -> tuple[str, list[str]]:
    ran.clear()
    return outer(go=go, which=which), list(ran)


def test_what_follows_the_inner_branch_is_run() -> None:
    assert run(True, "a") == ("after", ["a", "after"])


def test_only_the_chosen_case_is_run() -> None:
    assert run(True, "b") == ("after", ["b", "after"])


def test_nothing_of_a_branch_that_is_not_taken_is_run() -> None:
    assert run(False, "a") == ("skipped", ["skipped"])
