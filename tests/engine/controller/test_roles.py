"""The roles of a run: access by name, closing, and what a type checker knows of their calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api
from probe_worker import Probe

from engine.controller.groups import Roles
from engine.controller.launch import launch
from engine.controller.placement import Placement, Pool
from engine.controller.worker_host import RoleSpec
from engine.errors import PlacementError

CALLS = """
from engine.batch import Batch
from engine.controller.groups import Roles
from engine.batch import Future, LazyBatch


def right(roles: Roles, batch: Batch) -> dict[str, float]:
    lazy = LazyBatch(roles.rollout.generate(batch))
    lazy |= roles.reward.score(lazy)
    lazy |= roles.critic.values(lazy)
    old: Future[Batch] = roles.actor.log_probs(roles.reference.log_probs(lazy))
    roles.sampler.load_weights(roles.actor.weights()).result().bit_length()
    roles["judge"].verdict(old).result().anything()
    return roles.actor.update(old).result()


def wrong(roles: Roles, batch: Batch) -> None:
    roles.actor.updat(batch)
    roles.actor.update(3)
    roles.actor.update()
    roles.actor.save(batch)
    roles.actr.update(batch)
    roles.actor.update(batch)["loss"]
    roles.actor.log_probs(batch).result().lower()
"""
WRONG = [
    '"ActorGroup" has no attribute "updat"',
    'Argument 1 has incompatible type "int"; expected "Batch | LazyBatch | Future[Batch]"',
    "Too few arguments",
    'has incompatible type "Batch"; expected "str"',
    '"Roles" has no attribute "actr"',
    '"Future[dict[str, float]]" is not indexable',
    '"Batch" has no attribute "lower"',
]


def test_roles_by_name_and_closed_once() -> None:
    with launch(Placement((Pool(("probe",)),), kind="local"), [RoleSpec("probe", Probe)]) as run:
        group, calls = run["probe"], list[int]()
    roles = Roles({"probe": group}, lambda: calls.append(1))
    assert "probe" in roles
    with roles:
        assert roles["probe"] is getattr(roles, "probe") is group  # noqa: B009
        with pytest.raises(AttributeError, match=r"no role 'critic' .*\['probe'\]"):
            _ = roles.critic
        with pytest.raises(PlacementError, match=r"no role 'critic' .*\['probe'\]"):
            _ = roles["critic"]
    roles.close()
    assert calls == [1]


@pytest.mark.slow
def test_a_type_checker_knows_the_calls(tmp_path: Path) -> None:
    file, settings = tmp_path / "calls.py", tmp_path / "mypy.ini"
    file.write_text(CALLS)
    root = Path(__file__).parents[3]
    # Libraries are left out: what they do isn't asked, and they take a minute.
    settings.write_text(
        f"[mypy]\nmypy_path = {root}\nfollow_imports = silent\nignore_missing_imports = true\n"
        "ignore_errors = false\n"
        "[mypy-torch.*,transformers.*,ray.*,numpy.*,pandas.*,peft.*,vllm.*,pydantic.*]\n"
        "follow_imports = skip\n"
    )
    report, _, status = api.run(
        ["--config-file", str(settings), "--cache-dir", str(tmp_path / "cache"), str(file)]
    )
    first = CALLS.splitlines().index("def wrong(roles: Roles, batch: Batch) -> None:") + 2
    found = [line.split(": ", 2) for line in report.splitlines() if ": error: " in line]
    lines = [(int(where.rsplit(":", 1)[1]), text) for where, _, text in found]
    assert status == 1, report
    assert [number for number, _ in lines] == list(range(first, first + len(WRONG))), report
    for (_, text), wanted in zip(lines, WRONG, strict=True):
        assert wanted in text
