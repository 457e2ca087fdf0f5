"""What a package registers: caching, images, resources, the Ray cluster, the interface."""

from __future__ import annotations

import pytest
from flyte_runs import REPOSITORY, WORKFLOW, Place
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from protobufs import IMAGE, Registered
from registration import read_archive

from engine.data.rows import EVALUATION_ROWS, RL_PROMPTS, SFT_PAIRS
from engine.stages.dataset import SPLITS

ON_PREFERENCES = ("pairs", "reference_log_probs", "preference_training", "reward_model_training")
# These write the stage of a profile.
ON_MACHINES = {"sft", "rl", "evaluate", "promote", "reward_model_promotion", *ON_PREFERENCES}
STAGES = {f"{name}_stage" for name in ON_MACHINES} | {"evaluate_part_stage"}
DECIDE = {"promote_stage", "reward_model_promotion_stage"}
CACHED = {"preprocess", "ingest", *STAGES} - DECIDE
OF_PREFERENCES = ("preference", "reward_model", "classic_rlhf", "make_pairs")  # workflows
HANDLERS = {"rlhf_failed", "evaluate_only_failed", "promote_only_failed", "retraining_failed"}
HANDLERS |= {"agents_failed"}
HANDLERS |= {f"{name}_failed" for name in OF_PREFERENCES}
AROUND = {
    *("plan", "report", "fetch", "plan_promotion", "finalize", "trigger_retraining"),
    "learn_in_rounds",
    *(
        "finalize_skipped",
        "keep_promotion",
        "approval_request",
        "waits_for_approval",
        "review",
        "rollback",
    ),
}
ALL = CACHED | HANDLERS | AROUND | ON_MACHINES | DECIDE


def package_by_pyflyte(place: Place) -> Registered:
    """Package the workflows without a network."""
    target = place.root / "package.tgz"
    place.variables  # noqa: B018 (makes the folders)
    outcome = place.pyflyte(
        "--pkgs", "workflows", "package", "--image", f"default={IMAGE}", "--output", str(target),
        "-f", "--source", str(REPOSITORY),
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    return read_archive(target)


# They differ in what turns entities into an archive, which tests/workflows/test_register.py is on.
@pytest.fixture(scope="module", params=["ours", pytest.param("pyflyte", marks=pytest.mark.slow)])
def packaged(request: pytest.FixtureRequest) -> Registered:
    if request.param == "ours":
        found: Registered = request.getfixturevalue("registered")
        return found
    return package_by_pyflyte(request.getfixturevalue("new_place")())


@pytest.fixture(scope="module")
def tasks(packaged: Registered) -> dict[str, TaskTemplate]:
    """All tasks of ours, by short name."""
    templates = [m.template for (number, _), m in packaged.messages.items() if number == 1]
    ours = [template for template in templates if template.id.name.startswith("tasks.")]
    return {template.id.name.rsplit(".", 1)[-1]: template for template in ours}


def memory(resources: Resources) -> dict[int, str]:
    return {entry.name: entry.value for entry in resources.requests}


def test_every_stage_is_registered(tasks: dict[str, TaskTemplate]) -> None:
    assert set(tasks) == ALL


def test_stages_are_cached_by_content_code_and_image(tasks: dict[str, TaskTemplate]) -> None:
    for name, template in tasks.items():
        meta = template.metadata
        assert meta.discoverable == (name in CACHED), name
        assert meta.cache_serializable == (name in CACHED), name
        assert list(meta.cache_ignore_input_vars) == (["run"] if name in CACHED else []), name
        assert bool(meta.discovery_version) == (name in CACHED), name


def test_images_and_resources(tasks: dict[str, TaskTemplate]) -> None:
    cpu, mem = Resources.ResourceName.CPU, Resources.ResourceName.MEMORY
    for name, template in tasks.items():
        assert template.container.image == IMAGE, name
        asked = memory(template.container.resources)
        large = name in STAGES - {"rl_stage"}
        assert asked == ({cpu: "2", mem: "6Gi"} if large else {cpu: "1", mem: "2Gi"}), name


def test_retries_deadlines_and_spot_machines(tasks: dict[str, TaskTemplate]) -> None:
    """Long stages may lose their machine and try again; what writes to the registry may not."""
    for name, template in tasks.items():
        meta = template.metadata
        assert meta.retries.retries >= 2, name
        whole = tasks[f"{name}_stage"].metadata if name in ON_MACHINES else None
        longest = whole.timeout.seconds * (whole.retries.retries + 1) if whole else 3 * 86400
        longest = 18 * 86400 if name == "learn_in_rounds" else longest  # all stages of all rounds
        assert 0 < meta.timeout.seconds <= longest, name
        assert meta.interruptible == (name in CACHED | {"fetch"}), name
    assert tasks["rl_stage"].metadata.retries.retries == 5
    assert tasks["rl_stage"].metadata.timeout.seconds == 3 * 86400
    assert tasks["rl"].metadata.timeout.seconds == 18 * 86400, "all attempts at the stage"


def test_the_deck_is_registered(tasks: dict[str, TaskTemplate]) -> None:
    """Of every stage; not of the pods around it that decide or record nothing of their own."""
    with_deck = {name for name, one in tasks.items() if one.metadata.generates_deck.value}
    around = {"plan", "trigger_retraining", "fetch", "report", "review"}
    around |= {"finalize", "finalize_skipped", "rollback"}
    assert with_deck == around | {"preprocess", "ingest", *STAGES} - {"evaluate_part_stage"}


def test_tables_are_typed(tasks: dict[str, TaskTemplate]) -> None:
    """Flyte's console shows columns of the dataset's splits and of both models' rows."""
    splits = tasks["preprocess"].interface.outputs.variables
    assert set(splits) == {"dataset", *SPLITS}
    assert tasks["ingest"].interface.outputs.variables == splits
    for name, columns in (("train", RL_PROMPTS), ("sft_train", SFT_PAIRS)):
        kind = splits[name].type.structured_dataset_type
        assert [one.name for one in kind.columns] == list(columns)
        assert kind.format == "parquet"
    for stage in ("evaluate", "evaluate_stage"):
        rows = tasks[stage].interface.outputs.variables
        assert set(rows) == {"evaluation", "rows_warm_start", "rows_rl"}
        kind = rows["rows_rl"].type.structured_dataset_type
        assert [one.name for one in kind.columns] == list(EVALUATION_ROWS)


def test_the_interface_of_the_workflow(packaged: Registered) -> None:
    workflow = packaged.workflow("rlhf")
    inputs = workflow.interface.inputs.variables
    assert set(inputs) == {"config", "source", "path", "model", "seed", "profile"}
    assert all(variable.description for variable in inputs.values())
    assert [node.metadata.name for node in workflow.nodes] == [
        *("plan", "preprocess", "sft", "rl", "evaluate", "promotion", "report")
    ]
    assert workflow.failure_node.task_node.reference_id.name == "tasks.failure.rlhf_failed"
    defaults = packaged.launch_plan("workflows.rlhf.rlhf").default_inputs.parameters
    assert not any(parameter.required for parameter in defaults.values())


def test_agents_has_the_stages_of_rlhf(packaged: Registered) -> None:
    both = [packaged.workflow(name) for name in ("agents", "rlhf")]
    nodes = [[node.metadata.name for node in one.nodes] for one in both]
    assert nodes[0] == nodes[1]
    assert all(one.description for one in both[0].interface.inputs.variables.values())
    handler = both[0].failure_node.task_node.reference_id.name
    assert handler == "tasks.failure.agents_failed"


def test_the_workflows_of_preferences(packaged: Registered) -> None:
    nodes = {
        name: [node.metadata.name for node in packaged.workflow(name).nodes]
        for name in OF_PREFERENCES
    }
    first, last = ["plan", "preprocess", "sft"], ["evaluate", "promotion", "report"]
    scorer = ["pairs", "reward_model_training", "reward_model_promotion"]
    assert nodes["preference"] == [*first, "learn_in_rounds", *last]
    assert nodes["reward_model"] == [*first, *scorer, "finalize"]
    assert nodes["classic_rlhf"] == [*first, *scorer, "rl", *last]
    assert nodes["make_pairs"] == ["plan", "fetch", "preprocess", "pairs", "finalize"]
    for name in OF_PREFERENCES:
        template = packaged.workflow(name)
        assert all(one.description for one in template.interface.inputs.variables.values())
        handler = template.failure_node.task_node.reference_id.name
        assert handler == f"tasks.failure.{name}_failed"


def test_ppo_of_classic_rlhf_gets_the_reward_model(packaged: Registered) -> None:
    template = packaged.workflow("classic_rlhf")
    (ppo,) = [node for node in template.nodes if node.metadata.name == "rl"]
    (given,) = [one for one in ppo.inputs if one.var == "reward_model"]
    by_node = {node.id: node.metadata.name for node in template.nodes}
    assert by_node[given.binding.promise.node_id] == "reward_model_training"


def test_help_without_a_workflow(place: Place) -> None:
    outcome = place.invoke("run", str(WORKFLOW))
    assert outcome.code == 2
    assert "rlhf" in outcome.text
    assert "Warm-start a model" in outcome.text


def test_help_documents_the_inputs(place: Place) -> None:
    outcome = place.run("--help")
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    for words in (
        "config: Settings: a YAML or JSON file",
        "source: Data source, arithmetic, gsm8k or files",
        "model: Hugging Face model folder to start from",
        "seed: Seed of data, weights and sampling",
    ):
        assert words in said
