"""`python -m engine.export MODEL --to FOLDER`: what folder and card say, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants
from release_store import NAME, Made, edit, evaluate, make_run, register

from engine.cli.commands.export import main
from engine.storage.artifacts import read_manifest


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registered(tmp_path: Path, mlflow_store: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    shutil.copy(mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    made = make_run(tmp_path)
    register(made, promoted_at="2026-11-22T12:00:00Z", promotion_reason="gain 52 points")
    return made


def export(reference: object, to: Path, *more: str) -> ModelCard:
    assert main([str(reference), "--to", str(to), *more, "--dry-run"]) == 0
    assert not to.exists()
    assert main([str(reference), "--to", str(to), *more]) == 0
    return ModelCard((to / "README.md").read_text())


def test_a_champion_leaves_with_scores_data_settings_and_lineage(
    registered: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    card = export(f"models:/{NAME}@champion", out)
    digest = read_manifest(registered.rl).digest
    assert f"{NAME} version 1, content {digest}" in capsys.readouterr().out
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {
        "README.md", "lineage.json", "config.json", "model.safetensors", "tokenizer.json",
        "adapter/adapter_config.json",
    }  # fmt: skip
    assert (out / "model.safetensors").read_text() == "better"

    results = {one.metric_type: one for one in card.data.eval_results}
    assert results.keys() == {"pass@1", "pass@4", "majority", "format"}
    first = results["pass@1"]
    assert first.metric_value == 0.973
    assert first.metric_args == {"confidence": 0.95, "low": 0.953, "high": 0.993}
    assert first.dataset_args == {
        "problems": 512, "digest": read_manifest(registered.dataset).digest,
    }  # fmt: skip
    assert card.data.model_name == f"{NAME} version 1"
    assert card.data.tags == ["hybridflyte", "sft", "rl"]
    assert card.data.get("license") is None, "a model from scratch: its owner chooses"

    text = card.text
    assert "| pass@1 (greedy) | 45.1% [43.1%, 47.1%] | 97.3% [95.3%, 99.3%] |" in text
    assert "+52.2 percentage points [+47.7, +56.8]" in text
    assert "its weights began at random" in text
    assert "2026-11-22T12:00:00Z: gain 52 points" in text
    assert "rows_train 4,096" in text
    for artifact in (registered.rl, registered.sft, registered.dataset):
        manifest = read_manifest(artifact)
        assert f"| {manifest.kind} | `{manifest.digest}` | `{manifest.own_digest}` |" in text
    assert "lr: 0.0005" in text
    assert "````yaml" in text, "a setting with a fence must not end the block"
    whole = (out / "README.md").read_text() + (out / "lineage.json").read_text()
    assert str(tmp_path) not in whole, "folders of this machine are nobody's business"

    lineage = json.loads((out / "lineage.json").read_text())
    assert lineage["model"]["digest"] == digest
    kinds = [node["kind"] for node in lineage["nodes"]]
    assert sorted(kinds) == ["dataset", "rl", "sft", "source"]
    assert lineage["files"]["model.safetensors"] == (
        read_manifest(registered.rl).files["model.safetensors"].sha256
    )


def test_a_folder_gets_the_newest_evaluation_and_may_have_none(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    newer = evaluate(made.dataset, made.sft, made.rl, 0.5)
    edit(newer, "manifest.json", created_at="2099-01-01T00:00:00Z")
    card = export(made.rl, tmp_path / "one")
    assert {one.metric_value for one in card.data.eval_results} == {0.5}
    for evaluation in (newer, made.evaluation):
        shutil.rmtree(evaluation)
    card = export(made.rl, tmp_path / "two")
    assert card.data.eval_results is None
    assert "This model was not evaluated." in card.text


def test_a_version_has_the_evaluation_that_it_was_promoted_by(
    registered: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = evaluate(registered.dataset, registered.sft, registered.rl, 0.5)
    edit(newer, "manifest.json", created_at="2099-01-01T00:00:00Z")
    card = export(f"models:/{NAME}/1", tmp_path / "out")
    assert {one.metric_value for one in card.data.eval_results} == {0.973}
    shutil.rmtree(registered.evaluation)
    assert main([f"models:/{NAME}/1", "--to", str(tmp_path / "again")]) == 1
    assert "has no manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda made: (made.rl / "model.safetensors").write_text("x"), "model.safetensors differs"),
        (lambda made: shutil.rmtree(made.dataset), "dataset .* is missing"),
        (lambda made: (made.sft / "config.json").write_text("!"), "config.json differs"),
        (lambda made: edit(made.sft, "manifest.json", metrics={"loss": 0.1}), "sft/.* where"),
        (lambda made: (made.dataset / "manifest.json").write_text("{"), "dataset .* is missing"),
        (lambda made: (made.evaluation / "sets.json").write_text("[]"), "sets.json differs"),
        (lambda made: (made.rl / "manifest.json").unlink(), "no artifact with a manifest"),
    ],
    ids=["weights", "ancestor-gone", "ancestor-file", "manifest-edited", "manifest-torn", "scores",
         "no-manifest"],
)  # fmt: skip
def test_what_is_not_as_recorded_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil, message: str
) -> None:
    made = make_run(tmp_path)
    spoil(made)
    assert main([str(made.rl), "--to", str(tmp_path / "out")]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert re.search(message, error), error
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".out*"))


def test_a_source_that_changed_since_is_no_fault(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    (tmp_path / "raw.jsonl").write_text("more arrived\n")
    export(made.rl, tmp_path / "out")


def test_a_version_whose_copy_was_changed_is_refused(
    registered: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = list((tmp_path / "mlartifacts").rglob("model.safetensors"))
    assert copies
    for copy in copies:
        copy.write_text("poisoned")
    assert main([f"models:/{NAME}@champion", "--to", str(tmp_path / "out")]) == 1
    assert "MLflow's copy" in capsys.readouterr().err


def test_the_base_and_its_licence_come_from_its_card(tmp_path: Path) -> None:
    base = tmp_path / "base-1b"
    base.mkdir()
    card = "---\nlicense: other\nlicense_name: acme\nlicense_link: https://acme.org/l\n---\n# B\n"
    (base / "README.md").write_text(card)
    made = make_run(tmp_path, start=str(base), start_digest="ab" * 32)
    found = export(made.rl, tmp_path / "out")
    assert (found.data.license, found.data.license_name) == ("other", "acme")
    assert f"the folder `base-1b`, content digest `{'ab' * 32}`" in found.text
    assert "(the card of `base-1b`)" in found.text
    given = export(made.rl, tmp_path / "given", "--license", "mit")
    assert (given.data.license, given.data.license_name) == ("mit", None)


def test_a_hub_base_is_named_and_without_its_card_the_licence_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path, start=f"acme/base@{'c' * 40}")
    card = export(made.rl, tmp_path / "out")
    assert card.data.base_model == "acme/base"
    assert card.data.license is None
    assert f"`acme/base` at commit `{'c' * 40}`" in card.text
    assert "no card says the base's licence" in capsys.readouterr().err


def test_wrong_references_and_targets_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make_run(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for reference, to, message in (
        (made.dataset, tmp_path / "out", "is no model: it has no config.json"),
        (tmp_path / "nothing", tmp_path / "out", "has no manifest.json"),
        (made.rl, tmp_path / "there", "is there already"),
        (made.rl, "s3://bucket/out", "give a local folder, or hf://"),
        (made.rl, "hf://no-owner", "is no repository"),
        (f"models:/{NAME}@champion", tmp_path / "out", "there is no MLflow store"),
    ):
        assert main([str(reference), "--to", str(to)]) == 1
        assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]
    for wrong in (["x"], ["x", "--to", "y", "--out", "z"], ["x", "--out", "y", "--license", "mit"],
                  ["x", "--to", "y", "--private"], ["x", "--to", "y", "--model", "z"]):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2


def test_rl_from_an_instruct_model_as_it_is_names_that_as_its_base(tmp_path: Path) -> None:
    base = tmp_path / "instruct"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    made = make_run(tmp_path, start=str(base), first="start_model")
    card = export(made.rl, tmp_path / "out")
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["hybridflyte", "rl"]
    assert "| start model | this model |" in card.text


@pytest.mark.parametrize(
    ("source", "uri", "ids"),
    [
        ("gsm8k", "hf://openai/gsm8k:main", ["openai/gsm8k"]),  # data.path is empty
        ("gsm8k", "openai/gsm8k", ["openai/gsm8k"]),
        ("math", "hf://DigitalLearningGmbH/MATH-lighteval", ["DigitalLearningGmbH/MATH-lighteval"]),
        ("files", "data/mine", None),
    ],
)
def test_the_hub_dataset_that_was_read_is_named(
    source: str, uri: str, ids: list[str] | None, tmp_path: Path
) -> None:
    made = make_run(tmp_path, source=source, uri=uri)
    assert export(made.rl, tmp_path / "out").data.get("datasets") == ids
