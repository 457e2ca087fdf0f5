"""docs/kubernetes.md and docs/slurm.md: their YAML is valid and says what the tasks do."""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from kubernetes.client import ApiClient, V1PodSpec, V1Toleration

from engine.config import RLConfig
from engine.stages.profiles import PROFILES
from tasks.stages import rl_stage
from tasks.variants import LocalRayTask, ray_cluster

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/kubernetes.md", "docs/slurm.md")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page, those within lists too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", (ROOT / page).read_text(), re.M | re.S)
    return [textwrap.dedent(text) for _, text in found]


def manifests() -> list[dict[str, Any]]:
    return [d for text in blocks(PAGES[0], "yaml") for d in yaml.safe_load_all(text)]


def carried(profile: str) -> dict[str, Any]:
    """What the registered RL task gives to Flyte's Ray plugin."""
    image = Image(name="default", fqn="registry.example/hf", tag="v")
    settings = SerializationSettings(image_config=ImageConfig(default_image=image))
    only_this: Any = SimpleNamespace(_task_config=ray_cluster(PROFILES[profile]))
    return LocalRayTask.get_custom(only_this, settings)


def lacking(part: Any, whole: Any, at: str = "") -> Iterator[str]:
    """Where `part` says something that `whole` does not; items of lists may be left out."""
    if isinstance(part, dict) and isinstance(whole, dict):
        for key, value in part.items():
            yield from lacking(value, whole.get(key), f"{at}.{key}")
    elif isinstance(part, list) and isinstance(whole, list):
        for i, item in enumerate(part):
            if all(list(lacking(item, other)) for other in whole):
                yield f"{at}[{i}]: {item} is not in {whole}"
    elif part != whole:
        yield f"{at}: {part!r} is {whole!r}"


def test_the_comparison_sees_differences() -> None:
    whole = {"a": 1, "b": [{"name": "x", "value": 1}, {"name": "y", "value": 2}]}
    assert list(lacking({"b": [{"name": "y"}]}, whole)) == []
    assert list(lacking({"a": 2}, whole)) == [".a: 2 is 1"]
    assert list(lacking({"b": [{"name": "y", "value": 1}]}, whole))
    assert list(lacking({"c": 1}, whole))


def test_the_rl_task_is_shown_as_it_is() -> None:
    (shown,) = [d for d in manifests() if "rayCluster" in d]
    assert list(lacking(shown, carried("8xA100"))) == []


def test_manifests_name_one_namespace_and_what_belongs_together() -> None:
    found = {d["kind"]: d for d in manifests() if "kind" in d}
    assert all("apiVersion" in d for d in found.values())
    spaces = {d["metadata"]["namespace"] for d in found.values() if "namespace" in d["metadata"]}
    assert spaces == {found["Namespace"]["metadata"]["name"]}
    (flyte,) = [d for d in manifests() if "tasks" in d]
    template = found["PodTemplate"]
    assert template["metadata"]["name"] == flyte["plugins"]["k8s"]["default-pod-template-name"]
    (container,) = template["template"]["spec"]["containers"]
    assert container["name"] == "default", "any other name reaches no container"
    secret = container["envFrom"][0]["secretRef"]["name"]
    assert secret == found["Secret"]["metadata"]["name"]
    pod = template["template"]["spec"]
    assert pod["priorityClassName"] == found["PriorityClass"]["metadata"]["name"]
    # An own reader of Kubernetes' knows all fields of it.
    known = set(V1PodSpec.attribute_map.values())
    assert set(pod) <= known


def test_the_ray_plugin_is_enabled_in_both_lists() -> None:
    (flyte,) = [d["tasks"]["task-plugins"] for d in manifests() if "tasks" in d]
    assert "ray" in flyte["enabled-plugins"]
    assert flyte["default-for-task-types"][rl_stage.task_type] == "ray"
    assert set(flyte["default-for-task-types"].values()) <= set(flyte["enabled-plugins"])


def test_images_run_as_the_user_and_have_the_time_that_the_page_says() -> None:
    (template,) = [d["template"]["spec"] for d in manifests() if d.get("kind") == "PodTemplate"]
    for name in ("Dockerfile", "images/Dockerfile.cuda", "images/Dockerfile.rocm"):
        user = re.findall(r"^USER (\d+)$", (ROOT / name).read_text(), re.M)[-1]
        assert template["securityContext"]["runAsUser"] == int(user)
    grace = RLConfig().trainer.preemption_grace_s
    assert template["terminationGracePeriodSeconds"] > grace
    assert f"`preemption_grace_s` ({grace:g} s by default" in (ROOT / PAGES[0]).read_text()


def test_gpu_workers_tolerate_what_keeps_the_head_away() -> None:
    """The page has GPU spot nodes tainted twice, so that Ray's head stays off them."""
    (taints,) = [x for x in blocks(PAGES[0], "bash") if "kubectl taint" in x]
    for profile in PROFILES.values():
        if profile.gpus:
            pods = carried(profile.name)["rayCluster"]
            (workers,) = pods["workerGroupSpec"]
            keys = {t["key"] for t in workers["k8sPod"]["podSpec"]["tolerations"]}
            assert keys == {profile.resource}
            assert "tolerations" not in pods["headGroupSpec"]["k8sPod"]["podSpec"]
    assert "nvidia.com/gpu=present:NoSchedule" in taints
    (flyte,) = [d["plugins"]["k8s"] for d in manifests() if "plugins" in d]
    for toleration in flyte["interruptible-tolerations"]:
        assert f"{toleration['key']}=true:{toleration['effect']}" in taints
        assert set(toleration) <= set(V1Toleration.attribute_map.values())
    assert "interruptible-node-selector-requirement" not in flyte, "it would move the head as well"


def test_kubernetes_itself_reads_the_pods() -> None:
    """As its client does: a misspelt field would get lost on the way there and back."""
    (shown,) = [d["rayCluster"] for d in manifests() if "rayCluster" in d]
    pods = [shown["headGroupSpec"]["k8sPod"], shown["workerGroupSpec"][0]["k8sPod"]]
    client = ApiClient()
    for pod in pods:
        spec = client._ApiClient__deserialize(pod["podSpec"], V1PodSpec)
        assert client.sanitize_for_serialization(spec) == pod["podSpec"]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_need_a_cluster_say_so(page: str) -> None:
    for block in blocks(page, "bash"):
        for command in re.sub(r"\\\n", " ", block).splitlines():
            if command.strip():
                needs = re.match(
                    r"(kubectl|sbatch|flytectl|python -m workflows\.register)\b", command
                )
                assert bool(needs) == command.endswith("  # cluster"), command


def test_slurm_s_other_commands_run() -> None:
    ran = 0
    for block in blocks("docs/slurm.md", "bash"):
        for command in re.sub(r"\\\n", " ", block).splitlines():
            if command.strip() and not command.endswith("# cluster"):
                done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True)
                assert done.returncode == 0, done.stderr
                ran += 1
    assert ran == 2


def test_slurm_s_page_and_help_know_the_same_options() -> None:
    script = ROOT / "images" / "slurm" / "ray.sbatch"
    said = subprocess.run(["bash", script, "--help"], capture_output=True, text=True).stdout
    options = set(re.findall(r"^  (--[a-z-]+)", said, re.M))
    used = set(re.findall(r"ray\.sbatch((?: --[a-z-]+ \S+)+)", (ROOT / PAGES[1]).read_text()))
    assert used
    for words in used:
        assert set(re.findall(r"--[a-z-]+(?= )", words)) <= options
    read = set(re.findall(r"^ +(--[a-z-]+)(?: \| -h)?\) ", script.read_text(), re.M)) - {"--help"}
    assert read == options, "an option without help, or the reverse"
