"""Completion of commands in a shell: the script is run by bash."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from engine.cli.commands import completion


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "hybridflyte.bash"
    file.write_text(completion.script())
    return file


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m engine.main_p", "engine.main_ppo engine.main_preference"),
        ("python -m engine.main_ppo rl.trainer.total_tr", "rl.trainer.total_training_steps="),
        ("python -m engine.main_ppo actor_rollout_ref.model.pa", "actor_rollout_ref.model.path="),
        ("python -m engine.main_ppo --print", "--print-config"),
        ("python -m engine.main_ppo actor.optim.schedule = lin", "linear"),
        ("python -m engine.main_ppo actor.optim.schedule = ''", "constant linear cosine wsd"),
        ("python -m engine.main_ppo actor.optim.schedule=lin", "actor.optim.schedule=linear"),
        ("python -m engine.main_sft sft.skip = f", "false"),
        ("python -m engine.serve --max-m", "--max-model-len"),
        ("python -m engine.promotion ro", "rollback"),
        ("python -m engine.lineage --ver", "--verify"),
        ("python -m other.module --ver", ""),
        ("python script.py fo", ""),
    ],
)
def test_a_tab_completes(script: Path, words: str, expected: str) -> None:
    typed = [shlex.quote(word) for word in shlex.split(words)]
    program = (
        f"source {script}; COMP_WORDS=({' '.join(typed)}); COMP_CWORD={len(typed) - 1}; "
        'COMPREPLY=(); _hybridflyte; echo "${COMPREPLY[*]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split(), done.stderr


def test_every_command_is_known(script: Path) -> None:
    names = completion.commands()
    assert {"engine.main_ppo", "engine.serve", "engine.health"} <= set(names)
    text = script.read_text()
    assert all(f"        {name}) words=" in text for name in names)
