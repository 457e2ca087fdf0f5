"""What settings only name is in what stages are keyed by."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from engine.config import digest
from engine.stages.plan import model_digest, pin_model_commit, pin_named_content
from tasks.inputs import RLHFConfig

RAISES = "raise RuntimeError('imported')\n"


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the Python path."""
    folder = tmp_path / "plug"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("section", "file"),
    [
        ({"reward": {"name": "one_file:reward"}}, "one_file.py"),
        ({"algorithm": {"dataflow": "one_file:step"}}, "one_file.py"),
        ({"plugins": ["one_file"]}, "one_file.py"),
        ({"plugins": ["package_of.losses"]}, "package_of/inner/helper.py"),
    ],
)
def test_an_edited_module_is_another_configuration(
    plug: Path, section: dict[str, Any], file: str
) -> None:
    write(plug / "package_of" / "__init__.py", RAISES)
    write(plug / file, RAISES)
    config = RLHFConfig.model_validate({"rl": section})
    before = digest(pin_named_content(config).rl)
    assert before == digest(pin_named_content(config).rl)
    write(plug / file, RAISES + "# edited\n")
    assert digest(pin_named_content(config).rl) != before


def test_what_is_in_the_sources_anyway_or_not_there_adds_nothing() -> None:
    for section in ({}, {"plugins": ["nowhere_at_all"]}, {"plugins": ["engine.rewards.calls"]}):
        config = RLHFConfig.model_validate({"rl": section})
        assert pin_named_content(config).rl.named_content == ""
    # Of a recorded configuration, the digest of back then does not count.
    recorded = RLHFConfig.model_validate({"rl": {"named_content": "of back then"}})
    assert pin_named_content(recorded).rl.named_content == ""


def test_a_teacher_s_weights_count(tmp_path: Path) -> None:
    write(tmp_path / "teacher" / "model.safetensors", "weights")
    rl = {"algorithm": {"teacher": str(tmp_path / "teacher")}}
    config = RLHFConfig.model_validate({"rl": rl})
    before = pin_named_content(config)
    write(tmp_path / "teacher" / "model.safetensors", "others")
    assert pin_named_content(config) != before


def test_a_start_model_is_its_files_and_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write(base / "model.safetensors", "weights")
    write(adapter / "adapter_config.json", f'{{"base_model_name_or_path": "{base}"}}')
    config = RLHFConfig.model_validate({"model": {"path": str(adapter)}})
    assert pin_model_commit(config) == config
    before = model_digest(str(adapter))
    assert before == model_digest(str(adapter))
    write(base / "model.safetensors", "others")
    assert model_digest(str(adapter)) != before
    pinned = f"owner/name@{'a' * 40}"
    assert model_digest(pinned) == pinned


@pytest.mark.parametrize("section", ["rl", "evaluate"])
@pytest.mark.parametrize("file", ["games.py", "my_tools.py", "passages.jsonl", "calls.py"])
def test_an_edited_environment_tool_or_file_is_another_configuration(
    plug: Path, section: str, file: str
) -> None:
    for name in ("games.py", "my_tools.py", "calls.py"):
        write(plug / name, RAISES)
    write(plug / "passages.jsonl", "{}")
    search = {"name": "search", "options": {"corpus": str(plug / "passages.jsonl")}}
    options = {"tools": ["calculator", "my_tools:add", search]}
    agent = {"environment": {"name": "games:Game", "options": options}}
    rollout = {"multi_turn": {"enable": True, "format": "calls:read"}, "agent": agent}
    config = RLHFConfig.model_validate({"rl": {"rollout": rollout}})

    def found() -> str:
        return digest(getattr(pin_named_content(config), section))

    before = found()
    assert before == found()
    write(plug / file, "# edited\n")
    assert found() != before


def test_an_edited_package_of_verifiers_is_another_configuration(plug: Path) -> None:
    write(plug / "my_words" / "__init__.py", RAISES)
    write(plug / "my_words" / "rubric.py", RAISES)
    agent = {"environment": {"name": "verifiers", "options": {"id": "owner/my-words"}}}
    rollout = {"multi_turn": {"enable": True}, "agent": agent}
    config = RLHFConfig.model_validate({"rl": {"rollout": rollout}})
    before = pin_named_content(config)
    assert before.rl.rollout.agent.named_content
    assert pin_named_content(config) == before
    write(plug / "my_words" / "rubric.py", "# edited\n")
    after = pin_named_content(config)
    assert after.rl.rollout.agent.named_content != before.rl.rollout.agent.named_content
    assert after.evaluate.environments.named_content != before.evaluate.environments.named_content
