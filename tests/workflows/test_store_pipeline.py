"""A whole run whose artifacts go to a shared store, looked at from a machine that has only that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import s3_variables
from flyte_runs import STAGES, Outcome, Place, settings
from mlflow import MlflowClient

from engine.storage.artifacts import read_manifest

NAME = "hybridflyte-policy"


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    """A real S3 server, and the variables by which Flyte names it to pods."""
    with s3_variables("shared") as variables:
        yield {**variables, "HYBRIDFLYTE_STORE": "s3://shared/team"}


def elsewhere(folder: Path, place: Place, store: dict[str, str], *words: str) -> Outcome:
    """A command on a machine that has the store and MLflow's address, and no artifact."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "engine.lineage", *words],
        cwd=folder,
        env=place.environment({**store, "HYBRIDFLYTE_HOME": str(folder / "home")}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_s_lineage_is_verified_from_the_store_alone(
    place: Place, store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in store.items():
        monkeypatch.setenv(variable, value)
    for variable in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable, raising=False)
    outcome = place.run("--config", settings())
    assert outcome.code == 0, outcome.text
    digests = outcome.summary["digests"]
    folders = {stage: Path(outcome.summary["artifacts"][stage]) for stage in STAGES}
    addresses = {
        stage: f"s3://shared/team/artifacts/{stage}/{folders[stage].name}" for stage in STAGES
    }
    for stage in STAGES:
        assert f"{stage}: done in" in outcome.out
        assert addresses[stage] in outcome.out
        assert read_manifest(addresses[stage]) == read_manifest(folders[stage])
        for parent in read_manifest(addresses[stage]).parents:
            assert parent.kind == "source" or parent.uri in addresses.values()
    client = MlflowClient(place.tracking_uri, place.tracking_uri)
    # Whether or not so small a model was promoted.
    client.set_registered_model_alias(NAME, "champion", "1")
    champion = client.get_model_version_by_alias(NAME, "champion")
    assert champion.tags["artifact_uri"] == addresses["rl"]
    assert champion.tags["evaluation_uri"] == addresses["evaluation"]

    verified = elsewhere(tmp_path / "there", place, store, "verify", f"models:/{NAME}@champion")
    assert verified.code == 0, verified.text
    shown = elsewhere(tmp_path / "there", place, store, "show", digests["dataset"][:16])
    assert shown.code == 0, shown.text
    for stage in ("sft", "rl", "evaluation"):
        assert digests[stage][:12] in shown.out
    assert not (tmp_path / "there" / "home").exists()

    again = place.run("--config", settings())
    assert again.code == 0, again.text
    assert again.stages == ["promotion"], "what the store holds is not made again"
