"""Walks reach the source and every descendant, from wherever they start, and always end."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from lineage_store import Run, edit, make, make_nights, make_run, parent

from engine.checkpoint import CheckpointStore
from engine.errors import LineageError
from engine.lineage.graph import (
    ArtifactNode,
    Graph,
    GraphBuilder,
    Index,
    StoredArtifact,
    artifact_node,
    reachable,
    scan,
)
from engine.lineage.lookup import Review, _in_index, read_origin, write_origin
from engine.lineage.lookup import review as look
from engine.storage.artifacts import Draft, Parent, read_manifest
from engine.storage.filesystem import home


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def review(*references: Path | str, **options: object) -> Review:
    return look([str(r) for r in references], registry=False, **options)  # type: ignore[arg-type]


def edges(graph: Graph) -> set[tuple[str, str, str]]:
    kind = {key: node.kind for key, node in graph.nodes.items()}
    return {(kind[e.parent], e.name, kind[e.child]) for e in graph.edges.values()}


ABOVE_RL = {
    ("source", "gsm8k", "dataset"),
    ("dataset", "dataset", "sft"),
    ("dataset", "dataset", "rl"),
    ("sft", "warm_start", "rl"),
}
WHOLE = ABOVE_RL | {("rl", "policy", "evaluation"), ("dataset", "dataset", "evaluation")}


def test_the_graph_holds_ancestors_and_descendants(run: Run) -> None:
    found = review(run.rl)
    assert edges(found.graph) == WHOLE
    assert [node.kind for node in found.starts] == ["rl"]
    assert found.summary == "5 nodes: 1 dataset, 1 evaluation, 1 rl, 1 sft, 1 source"
    assert edges(review(run.rl, descendants=False).graph) == ABOVE_RL


@pytest.mark.parametrize("part", ["dataset", "sft", "evaluation", "raw"])
def test_every_part_of_a_run_leads_to_the_whole_of_it(run: Run, part: str) -> None:
    assert edges(review(getattr(run, part)).graph) == WHOLE


def test_a_sibling_is_not_a_relative(run: Run, tmp_path: Path) -> None:
    other = make_run(tmp_path, "other")
    digests = {node.digest for node in review(run.rl).graph.nodes.values()}
    assert read_manifest(other.rl).digest not in digests
    from_data = {node.digest for node in review(run.dataset).graph.nodes.values()}
    assert {read_manifest(r.rl).digest for r in (run, other)} <= from_data


def test_an_artifact_is_named_by_the_first_digits_of_its_digest(run: Run) -> None:
    digest = read_manifest(run.rl).digest
    assert review(digest[:10]).starts[0].uri == str(run.rl)
    missing = "0" * 9 + ("0" if digest[9] != "0" else "1")
    with pytest.raises(LineageError, match="no artifact's digest begins with"):
        review(missing)


def test_ambiguous_digits_are_refused() -> None:
    artifacts = tuple(
        StoredArtifact(f"/a/{number}", read_manifest(make("sft", str(number))))
        for number in range(2)
    )
    same = [
        replace(artifact, manifest=artifact.manifest.model_copy(update={"digest": f"{n:064}"}))
        for n, artifact in enumerate(artifacts)
    ]
    with pytest.raises(LineageError, match=r"00000000 is ambiguous: sft 0{16}, sft 0{16}; give"):
        _in_index("0" * 8, None, Index(artifacts=tuple(same)))
    digest = artifacts[0].manifest.digest
    assert _in_index(digest, None, Index(artifacts=artifacts)).uri == artifacts[0].uri


def test_a_manifest_file_and_a_file_address_name_their_folder(run: Run) -> None:
    for name in (f"{run.rl}/manifest.json", f"file://{run.rl}", f"{run.rl}/"):
        assert review(name).starts[0].digest == read_manifest(run.rl).digest


def test_the_graph_survives_a_moved_store(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(home() / "artifacts", tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "rl" / run.rl.name
    assert edges(review(moved, descendants=False).graph) == ABOVE_RL
    assert edges(review(moved, stores=[str(tmp_path / "elsewhere")]).graph) == WHOLE
    (tmp_path / "home2").mkdir()
    shutil.move(tmp_path / "elsewhere", tmp_path / "home2" / "artifacts")
    # In a folder of this name, its own store is found without being named.
    inside = tmp_path / "home2" / "artifacts" / "rl" / run.rl.name
    assert edges(review(inside).graph) == WHOLE
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home2"))
    copy = shutil.copytree(inside, tmp_path / "copy")
    assert edges(review(copy).graph) == WHOLE


def test_missing_parents_and_sources_say_why(run: Run) -> None:
    run.raw.unlink()
    shutil.rmtree(run.sft)
    missing = {n.kind: n.missing for n in review(run.rl).graph.nodes.values() if n.missing}
    assert set(missing) == {"source", "sft"}
    assert str(run.sft) in missing["sft"]
    assert str(run.raw) in missing["source"]


def test_another_artifact_at_the_recorded_address_is_not_the_parent(run: Run) -> None:
    impostor = make("sft", "impostor")
    shutil.rmtree(run.sft)
    shutil.copytree(impostor, run.sft)
    (missing,) = [n for n in review(run.rl).graph.nodes.values() if n.missing]
    assert f"where sft {read_manifest(impostor).digest[:12]} is now" in missing.missing


def test_of_equal_contents_the_one_that_the_child_recorded_is_the_parent(tmp_path: Path) -> None:
    first = make("sft", "weights", config={"lr": 1})
    second = make("sft", "weights", config={"lr": 2})
    model = make("rl", "model", parent("warm_start", second))
    (above,) = review(model, descendants=False).graph.ancestors(_key(model))
    assert above.uri == str(second)
    assert [n.uri for n in review(first).graph.nodes.values()] == [str(first)]
    assert len(review(second).graph.nodes) == 2


def _key(folder: Path) -> str:
    return artifact_node(StoredArtifact(str(folder), read_manifest(folder))).key


@pytest.mark.timeout(20)
def test_forged_cycles_end(run: Run) -> None:
    """Two manifests that name each other, and one that names itself."""
    own = {"name": "self", "kind": "sft", "digest": read_manifest(run.sft).digest}
    model = {"name": "child", "kind": "rl", "digest": read_manifest(run.rl).digest}
    edit(run.sft, parents=[own, model])
    graph = review(run.sft).graph
    assert ("sft", "self", "sft") in edges(graph)
    assert ("rl", "child", "sft") in edges(graph)
    assert ("sft", "warm_start", "rl") in edges(graph)


@pytest.mark.timeout(60)
def test_a_long_chain_of_nights_is_walked_whole(tmp_path: Path) -> None:
    model = make_nights(tmp_path, 60)
    graph = review(model).graph
    # All but the earlier nights' evaluations, which neither made the model nor came of it.
    assert len(graph.nodes) == 1 + 3 * 60 + 1
    assert len(review(tmp_path / "raw.jsonl").graph.nodes) == 1 + 4 * 60


def test_a_chain_deeper_than_the_recursion_limit_is_walked(tmp_path: Path) -> None:
    folder = make("sft", "one")
    whole = read_manifest(folder)
    artifacts = []
    above = whole.as_parent("p", "")
    for number in range(3000):
        digest = f"{number:064x}"
        manifest = whole.model_copy(update={"digest": digest, "parents": (above,)})
        artifacts.append(StoredArtifact(f"memory-{number}", manifest))
        above = Parent(name="p", kind="sft", digest=digest)
    builder = GraphBuilder(Index(artifacts=tuple(artifacts)))
    builder.walk(artifact_node(artifacts[-1]))
    assert len(builder.graph.nodes) == 3001


def test_reach_is_breadth_first_and_ends() -> None:
    links = {"a": ["b", "c"], "b": ["d"], "c": ["a"], "d": ["b"]}
    assert reachable("a", lambda key: links[key]) == ["a", "b", "c", "d"]


# Stores


def test_an_index_notes_what_it_cannot_read_and_skips_nested_and_hidden(run: Run) -> None:
    nested = run.dataset / "model"
    shutil.copytree(run.sft, nested)
    (home() / ".staging" / "rl-1").mkdir(parents=True)
    (home() / ".staging" / "rl-1" / "manifest.json").write_text("half")
    (run.evaluation / "manifest.json").write_text("{")
    index = scan([str(home())])
    assert {place.uri for place in index.artifacts} == {str(run.dataset), str(run.sft), str(run.rl)}
    assert len(index.unreadable) == 1
    assert "evaluation" in index.unreadable[0]


def test_a_store_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LineageError, match="does not exist; name a folder that holds artifacts"):
        scan([str(tmp_path / "none")])


def test_what_nothing_was_made_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stray.txt").write_text("x")
    with pytest.raises(LineageError, match="no artifact was made from it"):
        review(tmp_path / "stray.txt")


# Checkpoints


def save_checkpoint(root: Path) -> str:
    store = CheckpointStore(root)
    draft = store.begin(5)
    draft.metrics = {"reward": 0.5}
    draft.state = {"step": 5}
    return store.commit(draft).folder


def test_a_checkpoint_leads_to_what_its_stage_was_making(run: Run, tmp_path: Path) -> None:
    manifest = read_manifest(run.rl)
    root = tmp_path / "checkpoints"
    draft = Draft(kind="rl", parents=manifest.parents, config=manifest.config, mlflow_run="m1")
    written = write_origin(root, draft)
    assert read_origin(str(root)) == written
    assert list(root.iterdir()) == [root / "origin.json"]
    found = review(save_checkpoint(root))
    (node,) = found.starts
    assert (node.kind, node.label) == ("checkpoint", "rl checkpoint of step 5")
    assert node.facts["reward"] == "0.5"
    assert node.facts["mlflow_run"] == "m1"
    assert node.draft.config == manifest.config
    linked = edges(found.graph)
    assert ("sft", "warm_start", "checkpoint") in linked
    assert ("checkpoint", "checkpoint", "rl") in linked
    assert ("rl", "policy", "evaluation") in linked


def test_a_checkpoint_without_an_origin_stands_alone(tmp_path: Path) -> None:
    found = review(save_checkpoint(tmp_path / "ckpt"))
    assert found.summary == "1 node: 1 checkpoint"


def test_an_origin_that_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "origin.json").write_text(json.dumps({"kind": "rl"}))
    with pytest.raises(LineageError, match=r"origin\.json is not readable"):
        review(folder)


def test_nodes_have_names_for_people(run: Run) -> None:
    names = {node.kind: node.name for node in review(run.rl).graph.nodes.values()}
    assert names["source"] == "raw.jsonl"
    assert names["rl"] == f"rl {read_manifest(run.rl).digest[:12]}"
    assert ArtifactNode("k", "rl", "ab" * 32, "").name == "rl abababababab"
