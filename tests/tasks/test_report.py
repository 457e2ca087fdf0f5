"""The table at the end of a run: where to look further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.report import print_summary

PAGE = "https://mlflow.example.com/#/experiments/1/runs/ab"


def facts(tracking_uri: str, url: str) -> dict[str, Any]:
    """A summary, as `summarise` makes it."""
    return {
        "run_id": "20261121-024512-3f9a",
        "pass_at_1": {"warm_start": 0.4, "rl": 0.9},
        "pass_at_1_interval": {"warm_start": [0.3, 0.5], "rl": [0.8, 1.0]},
        "gain": 0.5,
        "gain_interval": [0.4, 0.6],
        "problems": 32,
        "seconds": {"dataset": 1.0, "total": 2.0},
        "cached": [],
        "promotion": {"model_version": "1", "reason": "better"},
        "mlflow": {
            "tracking_uri": tracking_uri,
            "experiment": "hybridflyte",
            "run_id": "ab",
            "url": url,
        },
    }


@pytest.mark.parametrize(
    ("tracking_uri", "url", "said", "unsaid"),
    [
        ("https://mlflow.example.com", PAGE, PAGE, "mlflow ui"),
        ("sqlite:////w/mlflow.db", "", "mlflow ui --backend-store-uri sqlite:////w/mlflow.db", "#"),
    ],
)
def test_mlflow_is_a_page_where_it_is_a_server_and_a_command_where_it_is_a_file(
    tracking_uri: str,
    url: str,
    said: str,
    unsaid: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = {"rl": tmp_path, "evaluation": tmp_path}
    print_summary(facts(tracking_uri, url), tmp_path / "summary.json", folders)
    line = next(line for line in capsys.readouterr().out.splitlines() if "MLflow UI" in line)
    assert said in line
    assert unsaid not in line
