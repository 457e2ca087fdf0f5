"""The code of the tutorials runs as it is printed: data, an algorithm, a source, a model.

Those of rewards and environments are in `test_docs`, that of a dataflow in
`dataflows/test_documented_algorithm.py`, that of `HybridActor` in `runtime/test_torchrun.py`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from once import OwnEntries
from tiny_engine import arithmetic_rows
from transformers import AutoConfig, AutoModelForCausalLM

from engine.algorithms import advantages
from engine.cli.commands.main_ppo import main
from engine.config import DataConfig, RLConfig
from engine.data import sources
from engine.data.contract import RL_PROMPTS, SFT_PAIRS, check, check_disjoint
from engine.data.loader import PromptLoader
from engine.data.sources import load_splits
from engine.data.tokenizer import load_tokenizer
from engine.models import load_model
from engine.trainers.rl import RLTrainer

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: OwnEntries
) -> Iterator[None]:
    """The modules of extending.md, on the Python path under the names that it gives them."""
    page = (DOCS / "extending.md").read_text()
    for name, text in re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (advantages._registry, sources._registry):
        own_entries(registry)
    yield
    for name in ("my_module", "my_source"):  # register again where they are imported again
        sys.modules.pop(name, None)


def one_step(model: Path, values: dict[str, object]) -> dict[str, float]:
    """The metrics of one step with these settings of `rl`."""
    small = {
        "rollout": {"n": 4},
        "reward": {"name": "tiny_engine:digit_share", "isolation": "none"},
        "trainer": {
            "total_training_steps": 1,
            "train_batch_size": 4,
            "placement": "local",
            "threads": 1,
        },
    }
    config = RLConfig.model_validate(small | values)
    loader = PromptLoader(pd.DataFrame(arithmetic_rows(8)), 4, 0)
    with RLTrainer(model, config, loader, max_response_length=6, max_model_len=40) as trainer:
        return trainer.fit()


def test_the_estimator_and_its_settings(tiny_folder: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "extending.md").read_text(), re.DOTALL)
    assert one_step(tiny_folder, yaml.safe_load(text)["rl"])["actor/grad_norm"] > 0


def test_the_source_gives_rows_of_the_contract() -> None:
    config = DataConfig(source="my_source:Squares", options={"largest": 25})
    splits = load_splits(config, seed=0)
    frames = splits.frames()
    assert [len(frame) for frame in frames.values()] == [5] * 5
    for name, frame in frames.items():
        check(frame, SFT_PAIRS if name.startswith("sft") else RL_PROMPTS, name)
    check_disjoint(frames)
    assert frames["test"].iloc[1]["reward_model"]["ground_truth"] == "81"


def test_the_model_trains_and_keeps_its_class(tiny_folder: Path, tmp_path: Path) -> None:
    import my_model

    config = my_model.QuietConfig.from_pretrained(tiny_folder)
    folder = tmp_path / "quiet"
    quiet = my_model.QuietForCausalLM.from_pretrained(tiny_folder, config=config)
    quiet.save_pretrained(folder)
    load_tokenizer(tiny_folder).save_pretrained(folder)
    assert isinstance(load_model(folder), my_model.QuietForCausalLM)
    assert one_step(folder, {"plugins": ["my_model"]})["actor/grad_norm"] > 0
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "quiet"
    assert AutoConfig.for_model("quiet").model_type == "quiet"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("data.md", "sums.csv"),
        ("quickstart.md", "sums.csv"),
        ("quickstart.md", "train.jsonl"),
        ("algorithms.md", "train.jsonl"),
    ],
)
def test_rows_of_a_page_take_its_printed_command(
    page: str, name: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = (DOCS / "quickstart.md").read_text()
    shown = r"^(\{.*ground_truth.*\}|question,answer|What .*,6)$"
    row, header, line = re.findall(shown, quickstart, re.MULTILINE)
    rows = [header, *(line.replace("2+4", f"{n}+4") for n in range(9))]
    if name == "train.jsonl":
        rows = [row.replace("13+14", f"{n}+14") for n in range(9)]
    (tmp_path / name).write_text("\n".join(rows))
    text = (DOCS / page).read_text().replace("\\\n", " ").splitlines()
    command = next(line for line in text if f"engine.main_ppo data.train_files={name}" in line)
    command = command.replace(name, str(tmp_path / name))
    command = command.replace("/models/Qwen2.5-0.5B", str(tiny_folder))
    small = ["data.max_response_length=6", "data.train_batch_size=8", "--dry-run"]
    assert main([*shlex.split(command)[3:], *small]) == 0
    assert "steps of 8 of 9 prompts" in capsys.readouterr().out
