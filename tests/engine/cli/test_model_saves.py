"""Model folders appear whole or not at all, and in places that last."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cli.run_folder import make_output_folder, save_atomically
from engine.errors import ConfigError, StorageError


def write(text: str) -> object:
    def save(folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(text)

    return save


def test_a_folder_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    assert save_atomically(write("one"), target) == target  # type: ignore[arg-type]
    (target / "stale.json").touch()
    save_atomically(write("two"), target)  # type: ignore[arg-type]
    assert (target / "model.safetensors").read_text() == "two"
    assert [p.name for p in target.iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_save_that_breaks_off_leaves_the_last_model(tmp_path: Path) -> None:
    target = tmp_path / "step_1"
    save_atomically(write("one"), target)  # type: ignore[arg-type]

    def broken(folder: str) -> None:
        write("half")(folder)  # type: ignore[operator]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_atomically(broken, target)
    assert (target / "model.safetensors").read_text() == "one"
    assert list(tmp_path.iterdir()) == [target]


def test_a_model_on_another_machines_disk_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="another machine"):
        save_atomically(lambda folder: None, tmp_path / "step_1")


def test_a_folder_that_can_t_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"can't write .*file"):
        make_output_folder(tmp_path / "file" / "out")
    assert make_output_folder(tmp_path / "new" / "out").is_dir()


def test_a_jobs_own_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / "out"
    with pytest.raises(ConfigError, match="deleted after it; give an absolute path"):
        make_output_folder(folder)
