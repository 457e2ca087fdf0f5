"""Inputs of tasks, tables, and what the cache pins."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
import rich_click as click
from flytekit import FlyteContextManager, StructuredDataset, task, workflow
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from transformers import Qwen2Config

from engine.config import digest
from engine.config.text import read_settings
from engine.data import contract, rows
from engine.errors import ConfigError, DataError, StorageError
from engine.stages.plan import learning_rate_warnings, model_digest, pin_named_content
from engine.storage.filesystem import pin_revision
from tasks.host import RLPrompts, SFTPairs, TableFile, as_table
from tasks.inputs import RLHFConfig


def test_json_text() -> None:
    assert read_settings(' {"rl": {"rollout": {"n": 4}}}') == {"rl": {"rollout": {"n": 4}}}


@pytest.mark.parametrize("name", ["c.yaml", "c.yml", "c.json", "c"])
def test_files_whatever_their_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"seed": 3, "data": {"source": "gsm8k"}}')
    assert read_settings(str(path)) == {"seed": 3, "data": {"source": "gsm8k"}}


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("# nothing changed\n")
    assert read_settings(str(path)) == {}


def test_small_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-3 as text; the configuration must not."""
    path = tmp_path / "c.yaml"
    path.write_text("rl: {actor: {optim: {lr: 1e-3}}}")
    config = RLHFConfig.model_validate(read_settings(str(path)))
    assert config.rl.actor.optim.lr == 1e-3


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match="can't be read"):
        read_settings(str(path))


def test_two_faults_are_both_named() -> None:
    with pytest.raises(click.UsageError) as caught:
        RLHFConfig.model_validate_json('{"sed": 1, "data": {"test_size": 0}}')
    assert "'sed'" in str(caught.value)
    assert "data.test_size=0" in str(caught.value)


def test_a_preset_by_its_name() -> None:
    config = RLHFConfig.model_validate(read_settings("preset:gsm8k-7b-8gpu"))
    assert config.model.path == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(ConfigError, match=r"preset:nope.*no such preset.*ppo"):
        read_settings("preset:nope")


def test_a_preset_with_changes(tmp_path: Path) -> None:
    plain = read_settings("preset:ppo")
    text = '{"preset": "ppo", "seed": 4, "rl": {"trainer": {"train_batch_size": 8}}}'
    changed = read_settings(text)
    assert changed.pop("seed") == 4
    assert changed["rl"]["trainer"]["train_batch_size"] == 8
    changed["rl"]["trainer"]["train_batch_size"] = plain["rl"]["trainer"]["train_batch_size"]
    assert changed == plain
    path = tmp_path / "mine.yaml"
    path.write_text("preset: ppo\nseed: 4\nrl: {trainer: {train_batch_size: 8}}\n")
    assert read_settings(str(path)) == read_settings(text)
    with pytest.raises(ConfigError, match=r"preset:nope.*no such preset.*ppo"):
        read_settings('{"preset": "nope"}')


ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"<b>{n}</b> + 1 = ?"}],
        "response": str(n + 1) * (300 if n == 0 else 1),
        "extra_info": {"index": n},
    }
    for n in range(40)
]


@pytest.fixture
def pairs(tmp_path: Path) -> TableFile:
    path = tmp_path / "sft_train.parquet"
    pd.DataFrame(ROWS).to_parquet(path, index=False)
    return TableFile(path)


@pytest.mark.parametrize("name", ["RL_PROMPTS", "SFT_PAIRS", "EVALUATION_ROWS"])
def test_the_columns_are_those_of_the_contract(name: str) -> None:
    schema = getattr(contract, name)
    required = [column for column, spec in schema.columns.items() if spec.required]
    assert list(getattr(rows, name)) == required


def test_flyte_knows_the_columns_and_their_types() -> None:
    columns = TypeEngine.to_literal_type(RLPrompts).structured_dataset_type.columns
    assert [one.name for one in columns] == list(rows.RL_PROMPTS)
    assert columns[0].literal_type.simple == TypeEngine.to_literal_type(str).simple
    assert columns[1].literal_type == TypeEngine.to_literal_type(list[dict[str, str]])


def test_a_table_passes_between_tasks_where_it_lies(pairs: TableFile) -> None:
    seen: list[Path] = []

    @task
    def make(path: str) -> SFTPairs:
        return as_table(TableFile(Path(path)))

    @task
    def use(table: SFTPairs) -> int:
        file = table.open(TableFile).all()
        seen.append(file.path)
        frame = file.read(contract.SFT_PAIRS, "sft_train")
        assert list(frame.columns) == ["prompt", "response", "extra_info"], "all, not the typed"
        return len(frame)

    @workflow
    def both(path: str) -> int:
        return use(table=make(path=path))

    assert both(path=str(pairs.path)) == 40
    assert seen == [pairs.path], "nothing was copied"


@pytest.mark.parametrize("uri", ["", "s3://store/artifacts/dataset/1/sft_train.parquet"])
def test_a_pod_uploads_only_what_is_not_in_the_store(
    pairs: TableFile, tmp_path: Path, uri: str
) -> None:
    context = FlyteContextManager.current_context()
    access = context.file_access.__class__(str(tmp_path / "pod"), str(tmp_path / "raw"))
    mode = ExecutionState.Mode.TASK_EXECUTION
    state = context.new_execution_state().with_params(mode=mode)
    pod = context.with_file_access(access).with_execution_state(state).build()
    with FlyteContextManager.with_context(pod.new_builder()) as inside:
        table = as_table(TableFile(pairs.path, uri))
        kind = TypeEngine.to_literal_type(SFTPairs)
        literal = TypeEngine.to_literal(inside, table, SFTPairs, kind)
    found = literal.scalar.structured_dataset
    assert [one.name for one in found.metadata.structured_dataset_type.columns] == [
        "prompt",
        "response",
    ]
    if uri:
        assert found.uri == uri
        assert not (tmp_path / "raw").exists()
    else:
        assert found.uri.startswith(str(tmp_path / "raw"))
        assert Path(found.uri).read_bytes() == pairs.path.read_bytes()


def test_what_breaks_the_contract_ends_in_one_sentence(pairs: TableFile, tmp_path: Path) -> None:
    frame = pd.read_parquet(pairs.path)
    frame.loc[7, "response"] = " "
    broken = TableFile(tmp_path / "broken.parquet")
    frame.to_parquet(broken.path, index=False)
    with pytest.raises(DataError, match=r"^train: column 'response' must not be empty.*row 7 has"):
        broken.read(contract.SFT_PAIRS, "train")
    broken.path.write_bytes(b"no table")
    with pytest.raises(StorageError, match=r"train: the table .* can't be read .*overwrite-cache"):
        broken.read(contract.SFT_PAIRS, "train")


def test_a_deck_shows_the_first_rows_as_text(pairs: TableFile) -> None:
    context = FlyteContextManager.current_context()
    kind = get_args(SFTPairs)[0]
    assert kind is StructuredDataset
    page = TypeEngine.to_html(context, as_table(pairs), SFTPairs)
    assert page.count("<tr") == 1 + 10
    assert "sft_train.parquet" in page
    assert "&lt;b&gt;3&lt;/b&gt; + 1" in page
    assert "<b>" not in page
    assert "1" * 200 + "…" in page


def test_a_frame_of_no_artifact_is_written_for_the_next_task() -> None:
    written = TableFile.write(pd.DataFrame(ROWS))
    frame = written.read(contract.SFT_PAIRS, "part 1")
    assert list(frame["response"]) == [row["response"] for row in ROWS]


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


@pytest.mark.parametrize(
    ("workflow", "stages"),
    [
        ("rlhf", ["sft", "rl.actor"]),
        ("preference", ["sft", "preference"]),
        ("evaluate_only", []),
        ("make_pairs", []),
    ],
)
def test_stages_whose_rate_may_ruin_a_pretrained_model_are_named(
    tmp_path: Path, workflow: str, stages: list[str]
) -> None:
    Qwen2Config(vocab_size=1 << 17, hidden_size=512, num_hidden_layers=1).save_pretrained(tmp_path)
    values: dict[str, Any] = {"model": {"path": str(tmp_path)}}
    values["preference"] = {"optim": {"lr": 1e-3}}

    def named(**more: object) -> list[str]:
        config = RLHFConfig.model_validate(values | more)
        return [line.split(".optim.lr=")[0] for line in learning_rate_warnings(config, workflow)]

    assert named() == stages
    assert named(sft={"skip": True}) == [name for name in stages if name != "sft"]
    assert named(model={}) == []


def test_a_start_model_is_its_files_and_its_base(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write(base / "model.safetensors", "weights")
    write(adapter / "adapter_config.json", f'{{"base_model_name_or_path": "{base}"}}')
    config = RLHFConfig.model_validate({"model": {"path": str(adapter)}})
    assert pin_revision(config.model.path) == config.model.path
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


@pytest.mark.parametrize("name", ["{}/mine.py:play", "mine:play", "python {}/mine.py --fast"])
def test_an_edited_agent_is_another_configuration(plug: Path, name: str) -> None:
    write(plug / "mine.py", RAISES)
    agent = {"play": name.format(plug)}
    rollout = {"multi_turn": {"enable": True}, "agent": agent}
    config = RLHFConfig.model_validate({"rl": {"rollout": rollout}})
    before = pin_named_content(config)
    assert before.rl.rollout.agent.named_content
    assert pin_named_content(config) == before
    write(plug / "mine.py", "# edited\n")
    after = pin_named_content(config)
    assert after.rl.rollout.agent.named_content != before.rl.rollout.agent.named_content
    assert after.evaluate.environments.named_content != before.evaluate.environments.named_content
