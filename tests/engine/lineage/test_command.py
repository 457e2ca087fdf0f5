"""The lineage command and its comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from lineage_store import Run, edit, make, make_run, parent

from engine.lineage.__main__ import main
from engine.lineage.compare import ABSENT, ArtifactComparison, compare, lines, row_change
from engine.lineage.lookup import review
from engine.storage.artifacts import Draft, Parent, publish, read_manifest, staging
from engine.storage.digests import hash_file
from engine.tracking.connection import flatten


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


@pytest.mark.parametrize("command", [["show"], []])
def test_show_prints_what_made_it_and_what_came_of_it(run: Run, capsys, command: list[str]) -> None:
    assert main([*command, str(run.rl)]) == 0
    out = capsys.readouterr().out
    digest = read_manifest(run.rl).digest
    assert out.startswith(f"rl {digest[:12]} {run.rl}")
    assert "warm_start: sft" in out
    assert "reward=0.875" in out
    assert "shown elsewhere" in out
    assert f"gsm8k: source {hash_file(run.raw)[:12]} {run.raw}" in out
    assert f"config {read_manifest(run.sft).config_digest[:12]}" in out
    assert f"what came of rl {digest[:12]}" in out
    assert "as policy: evaluation" in out


def test_control_sequences_of_a_manifest_are_not_sent_to_the_terminal(run: Run, capsys) -> None:
    edit(run.sft, code_version="\x1b[2Jforged", metrics={"loss\x1b]0;x\x07": 1.0})
    assert main(["show", str(run.rl), "--verify"]) == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "code \\x1b[2Jforged" in shown.out
    assert main(["diff", str(run.sft), str(run.rl)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_pair_of_keys_and_what_they_signed(
    run: Run, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["keygen", "key.pem"]) == 0
    printed = capsys.readouterr().out
    assert main(["keygen", "key.pem"]) == 1
    assert "name a file that is not there" in capsys.readouterr().err
    for line in printed.splitlines():
        name, _, value = line.removeprefix("export ").partition("#")[0].strip().partition("=")
        monkeypatch.setenv(name, value)
    assert main(["verify", str(run.rl), "--require-signatures"]) == 1
    shown = capsys.readouterr().err
    assert [shown.count(f"{kind} ") > 0 for kind in ("dataset", "sft", "rl")] == [True] * 3
    assert shown.count("is not signed") == 3
    signed = make_run(tmp_path)
    assert main(["verify", str(signed.rl), "--require-signatures"]) == 0
    assert main(["show", str(signed.rl)]) == 0
    assert "signed by " in capsys.readouterr().out
    edit(signed.sft, metrics={"validation_loss": 0.0})
    assert main(["verify", str(signed.sft)]) == 1, "a signature that is there must hold"
    assert "the manifest was edited" in capsys.readouterr().err


def test_show_as_json(run: Run, capsys) -> None:
    assert main(["show", str(run.rl), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    nodes = {node["key"]: node for node in values["nodes"]}
    (focus,) = values["focus"]
    assert nodes[focus]["manifest"]["metrics"] == {"reward": 0.875}
    assert nodes[focus]["manifest_digest"] == read_manifest(run.rl).own_digest
    into = {nodes[e["parent"]]["kind"]: e["name"] for e in values["edges"] if e["child"] == focus}
    assert into == {"sft": "warm_start", "dataset": "dataset"}
    assert "verified" not in values


def test_verify_ends_with_0_and_after_tampering_with_1(run: Run, capsys) -> None:
    assert main(["verify", str(run.rl)]) == 0
    assert "verified: 4 artifacts and sources are as recorded" in capsys.readouterr().err
    (run.dataset / "content.txt").write_text("poisoned")
    edit(run.sft, metrics={})
    assert main(["verify", str(run.rl), "--json"]) == 1
    done = capsys.readouterr()
    assert "error: " in done.err
    assert "content.txt differs" in done.err
    values = json.loads(done.out)
    assert values["verified"] is False
    assert len(values["faults"]) == 2
    assert main(["show", str(run.rl), "--verify"]) == 1
    assert main(["verify"]) == 1
    assert main(["verify", str(run.raw)]) == 0


def test_diff_prints_both_sides_and_ends_with_0(run: Run, tmp_path: Path, capsys) -> None:
    other = make_run(tmp_path, "other")
    assert main(["diff", str(run.rl), str(other.rl)]) == 0
    out = capsys.readouterr().out
    assert f"- rl {read_manifest(run.rl).digest[:12]}" in out
    assert "rl.text: better → other" in out
    assert main(["diff", str(run.rl), str(other.rl), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["differences"]
    assert values["config"] == [{"name": "rl.text", "before": "better", "after": "other"}]


def test_an_html_page_is_written_whole_or_not_at_all(run: Run, tmp_path: Path, capsys) -> None:
    assert main(["show", str(run.rl), "--html", str(tmp_path / "page.html")]) == 0
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert main(["show", str(run.rl), "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "choose another file" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main(["show", str(run.rl), "--html", str(tmp_path / "folder")]) == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "arguments", [[], ["--wrong"], ["diff", "one"], ["show"], ["verify", "--htlm", "x"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m engine.lineage" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "diff", "verify"])
def test_help_says_what_may_be_named_and_how_it_ends(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("models:/NAME@ALIAS", "--json", "--html FILE", "--store ROOT", "exit status: 0"):
        assert words in out


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nothing", "has no manifest.json"),
        ("0123456789", "no artifact's digest begins with 0123456789 in"),
        ("models:/policy@champion", "there is no MLflow store at sqlite"),
        ("nosuch://x", "can't read nosuch://x"),
    ],
)
def test_what_names_nothing_is_one_sentence(run: Run, reference: str, message: str, capsys) -> None:
    assert main(["show", reference]) == 1
    done = capsys.readouterr()
    assert done.out == ""
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not Path("mlflow.db").exists()


def test_the_module_runs_as_a_program(run: Run) -> None:
    command = [sys.executable, "-m", "engine.lineage", "verify", str(run.rl), str(run.raw) + "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "has no manifest.json" in done.stderr


def diff(before: Path, after: Path) -> ArtifactComparison:
    found = review([str(before), str(after)], registry=False, descendants=False)
    return compare(found.graph, found.starts[0], found.starts[-1])


def dataset(rows: list[dict[str, Any]], **more: Any) -> Path:
    with staging("dataset") as folder:
        pd.DataFrame(rows).to_parquet(folder / "train.parquet", index=False)
        (folder / "same.txt").write_text("same")
        return publish(folder, Draft(kind="dataset", config=more))


def model(data: Path, text: str, lr: float, version: str, reward: float) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDFLYTE_CODE_VERSION", version)
        config = {"rl": {"lr": lr, "steps": 3, "empty": {}}, "text": "x"}
        return make("rl", text, parent("dataset", data), config=config, reward=reward, kl=0.5)


def test_settings_data_code_and_metrics_of_two_models() -> None:
    rows = [{"prompt": [{"role": "user", "content": str(n)}], "n": n} for n in range(10)]
    one, two = dataset(rows), dataset([*rows[1:], {"prompt": [], "n": 99}, {"prompt": [], "n": 99}])
    before, after = model(one, "a", 0.1, "v1", 0.5), model(two, "b", 0.2, "v2", 0.75)
    found = diff(before, after)
    assert [(c.name, c.before, c.after) for c in found.config] == [("rl.lr", "0.1", "0.2")]
    assert ("code version", "v1", "v2") in [(c.name, c.before, c.after) for c in found.code]
    metrics = {m.name: (m.before, m.after, m.delta) for m in found.metrics}
    assert metrics == {"reward": (0.5, 0.75, 0.25), "kl": (0.5, 0.5, 0.0)}
    (data,) = found.data
    assert [c.name for c in data.files] == ["train.parquet"]
    (table,) = data.rows
    assert (table.before, table.after, table.added, table.removed) == (10, 11, 2, 1)
    assert [c.name for c in found.parents] == ["dataset"]
    assert [c.name for c in found.files] == ["content.txt"]
    assert not found.same_content


def test_an_artifact_does_not_differ_from_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = diff(run.rl, run.rl)
    assert found.same_content
    assert (found.config, found.data, found.code, found.parents, found.files) == ((),) * 5
    assert "both hold the same bytes" in list(lines(found))


def test_settings_that_only_one_side_has_and_metrics_that_are_no_numbers() -> None:
    one = make("sft", "a", config={"a": 1, "b": None}, loss=float("inf"))
    two = make("sft", "b", config={"b": "x", "c": {"d": []}}, other=1.0)
    found = diff(one, two)
    assert {c.name: (c.before, c.after) for c in found.config} == {
        "a": ("1", ABSENT),
        "b": ("null", "x"),
        "c.d": (ABSENT, "[]"),
    }
    assert {m.name: m.delta for m in found.metrics} == {"loss": None, "other": None}


def test_data_that_only_one_side_has() -> None:
    source = Parent(name="raw", kind="source", digest="ab" * 32, uri="s3://a/b")
    with_data = make("rl", "one", parent("dataset", make("dataset", "rows", source)))
    found = diff(make("rl", "two"), with_data)
    assert [(c.kind, c.before) for c in found.data] == [("dataset", None), ("source", None)]
    text = "\n".join(lines(found))
    assert "source: — → s3://a/b (abababababab)" in text


def test_rows_of_json_lines_and_columns(tmp_path: Path) -> None:
    for name, text in (("one", '{"a": 1}\n{"a": 2}\n'), ("two", '{"a": 2, "b": 1}\n\n{"a": 1}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text(text)
        (tmp_path / name / "x.bin").write_text(text)
    found = row_change("x.jsonl", str(tmp_path / "one"), str(tmp_path / "two"))
    assert found is not None
    assert (found.added, found.removed, found.columns) == (1, 1, "+b")
    assert row_change("x.bin", str(tmp_path / "one"), str(tmp_path / "two")) is None
    (tmp_path / "two" / "x.jsonl").write_text("no JSON")
    assert row_change("x.jsonl", str(tmp_path / "one"), str(tmp_path / "two")) is None


def test_flatten_names_nested_settings() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [1]}) == {"a.b.c": 1, "a.d": {}, "e": [1]}
