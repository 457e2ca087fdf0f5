"""`python -m engine.samples FOLDER`: the page in a file, or served."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from step_batches import step_batch, tokenizer

from engine.samples.__main__ import main, make_server
from engine.samples.sample_files import find_samples
from engine.samples.writer import RolloutLog


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two samples and no page."""
    folder = tmp_path / "sums"
    with RolloutLog(folder / "rollouts", tokenizer, every=1, rows=4, last_step=2) as log:
        for step in (1, 2):
            log.rollouts("train", step, step_batch({"2+2=": [f"{step} says 4"]}, [1.0]))
            log.step_done([{"step": 1.0, "reward/mean": 0.5}])
    (folder / "rollouts" / "rollouts.html").unlink()
    return folder


def test_the_page_is_written_beside_the_samples_or_where_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    beside = run / "rollouts" / "rollouts.html"
    assert capsys.readouterr().out.strip().endswith("sums/rollouts/rollouts.html")
    assert main([str(run / "rollouts"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == beside.read_text()
    assert "/sums</title>" in beside.read_text()


def test_wrong_input_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "has no samples of rollouts" in capsys.readouterr().err
    assert main([str(run), "--html", str(tmp_path / "nowhere" / "page.html")]) == 1
    assert "choose another file with --html" in capsys.readouterr().err
    (run / "rollouts" / "train_000001.parquet").write_bytes(b"")
    assert main([str(run)]) == 1
    assert "train_000001.parquet is no readable sample" in capsys.readouterr().err


def test_it_is_served_to_this_machine_anew_at_each_visit(run: Path) -> None:
    with make_server(find_samples(run), 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert '"step":2' in answer.read().decode()
        (run / "rollouts" / "train_000002.parquet").unlink()
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert '"step":2' not in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/train_000001.parquet", timeout=30)
        server.shutdown()


def test_the_command_loads_neither_torch_nor_transformers(run: Path) -> None:
    code = (
        "import sys; from engine.samples.__main__ import main; "
        f"status = main([{str(run)!r}]); "
        "bad = {'torch', 'transformers', 'ray', 'mlflow'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
