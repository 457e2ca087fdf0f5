"""The notebook of `examples/` runs as it is stored, and its reward rises again.

`python tests/test_notebooks.py` runs it and stores it with its new outputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def executed(path: Path) -> Any:
    """The notebook after a run in a kernel of this environment, each stream as it looks at last."""
    import nbclient

    notebook, metadata = read(path), read(path).metadata
    client = nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = metadata  # without the version of this Python
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[tuple[str, list[str]]]:
    """The outputs of a cell: stream or mimetypes of each."""
    return [(o.output_type, [o.get("name", ""), *sorted(o.get("data", {}))]) for o in cell.outputs]


def first_and_last_reward(notebook: Any) -> tuple[float, float]:
    pattern = r"mean reward: ([\d.]+) in the first 5 steps, ([\d.]+) in the last 5"
    texts = [o.text for c in code_cells(notebook) for o in c.outputs if o.get("name") == "stdout"]
    ((first, last),) = re.findall(pattern, "".join(texts))
    return float(first), float(last)


def test_the_notebook_is_stored_as_it_ran() -> None:
    """In order, without an error or a warning, with curves, and each bar of progress one line."""
    cells = code_cells(read(NOTEBOOK))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    bars = [output.text for output in outputs if output.get("name") == "stderr"]
    assert [text.count("\n") for text in bars] == [1, 1]
    assert all(": 100%" in text and "\r" not in text for text in bars)
    assert all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    first, last = first_and_last_reward(read(NOTEBOOK))
    assert last > first + 0.1


def test_links_of_the_notebook_lead_somewhere() -> None:
    texts = [cell.source for cell in read(NOTEBOOK).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(texts))
    assert len(links) > 2
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_the_notebook_runs_and_its_reward_rises() -> None:
    """In a kernel of this environment; the figures may differ between machines."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = executed(NOTEBOOK)
    first, last = first_and_last_reward(notebook)
    assert last > first + 0.1
    stored = code_cells(read(NOTEBOOK))
    for cell, before in zip(code_cells(notebook), stored, strict=True):
        assert kinds(cell) == kinds(before), cell.source


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK), NOTEBOOK)
