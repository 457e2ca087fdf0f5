"""The one-way dependencies, read from the source: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("engine", "tasks", "workflows")
FLYTE = ("flytekit", "flytekitplugins", "flyteidl", "flyte", "flyteidl2", "flyteplugins")


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, package: str) -> Iterator[str]:
    """Modules that an import statement may load; `from a import b` counts as a and a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: -node.level or None]
            base = ".".join([*above, *([base] if base else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def imports(path: Path, at_import_time: bool = False) -> frozenset[str]:
    """All modules a file imports; with `at_import_time`, only those that loading it imports."""
    return _imports(path)[at_import_time]


@cache  # most rules read every file
def _imports(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    tree, package = ast.parse(path.read_text()), module_name(path) + ".x"
    return (
        frozenset(module for node in ast.walk(tree) for module in imported(node, package)),
        frozenset(module for node in _run_on_load(tree) for module in imported(node, package)),
    )


def _run_on_load(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes outside of functions and of what only a type checker reads."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
            continue
        yield node
        todo.extend(ast.iter_child_nodes(node))


def under(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def breaches(folder: str, *forbidden: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Imports of `forbidden` modules in `folder`, except those that are `allowed`."""
    files = sources(folder)
    assert files, folder
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in sorted(imports(path))
        if under(module, *forbidden) and not under(module, *allowed)
    ]


def test_the_reader_sees_all_kinds_of_imports(tmp_path: Path) -> None:
    tree = ast.parse("import a.b\nfrom c import d\nfrom . import e\nfrom .f import g")
    found = {m for node in tree.body for m in imported(node, "p.q.x")}
    assert {"a.b", "c", "c.d", "p.q.e", "p.q.f", "p.q.f.g"} <= found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and those for a type checker alone count as well."""
    modules = {module_name(path): path for folder in OURS for path in sources(folder)}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for module in imports(path):
            while module and module not in modules:
                module = module.rpartition(".")[0]
            # A package is loaded before its modules, whether they name it or not.
            if module and module != name and not name.startswith(module + "."):
                graph[name].add(module)
    TopologicalSorter(graph).prepare()


def test_engine_knows_nothing_of_flyte() -> None:
    assert breaches("engine", *FLYTE, "examples", "tasks", "workflows") == []
    assert breaches("examples", *FLYTE, "tasks", "workflows") == []


def test_neither_front_knows_the_other() -> None:
    assert breaches("tasks", "flyte", "flyteidl2", "flyteplugins") == []
    pipelines = ("workflows.pipelines", "workflows.flyte2")
    theirs = ("flytekit", "flytekitplugins", "flyteidl", "tasks", "workflows")
    above = breaches("workflows/flyte2", *theirs, allowed=pipelines)
    assert [breach for breach in above if not breach.endswith(" imports workflows")] == []
    shared = ROOT / "workflows/pipelines.py"
    assert [m for m in imports(shared) if under(m, *FLYTE, "tasks", "workflows")] == []


def test_tasks_don_t_know_workflows_and_workflows_don_t_compute() -> None:
    assert breaches("tasks", "examples", "workflows") == []
    assert breaches("workflows", "torch", "ray", "transformers", "vllm") == []


def test_algorithms_stand_alone() -> None:
    allowed = ("engine.algorithms", "engine.errors", "engine.registry")
    assert breaches("engine/algorithms", *OURS, "ray", "transformers", allowed=allowed) == []


@pytest.mark.parametrize("package", ["rollout", "models", "rewards", "data"])
def test_packages_side_by_side_don_t_know_each_other(package: str) -> None:
    # `storage`: where S3 is, and what names a model on the hub.
    shared = ("batch", "config", "errors", "final_answers", "redaction", "registry", "algorithms")
    shared += ("kernels", "storage", "worker_process", package)
    # A reward model reads conversations as the templates of its training wrote them.
    shared += ("data",) if package == "rewards" else ()
    # vLLM's workers are members of the trainer's broadcasts.
    shared += ("weight_transfer",) if package == "rollout" else ()
    known = tuple(f"engine.{name}" for name in shared)
    files = [
        module
        for path in sources(f"engine/{package}")
        for module in imports(path)
        # `from engine import batch` counts as engine and engine.batch; engine alone says nothing.
        if under(module, *OURS) and module != "engine" and not under(module, *known)
    ]
    assert files == []


def test_parallel_knows_layouts_and_tensors_alone() -> None:
    allowed = ("engine.parallel", "engine.config", "engine.errors")
    assert breaches("engine/parallel", *OURS, "ray", "vllm", allowed=allowed) == []


@pytest.mark.parametrize("name", ["layout", "shard_maps", "reshard"])
def test_a_resharding_plan_is_made_of_values(name: str) -> None:
    """So that one for 1,024 ranks can be made, and looked at, on one."""
    path = ROOT / "engine/parallel" / f"{name}.py"
    impure = ("torch.distributed", "engine.parallel.module_shards", "engine.parallel.exchange")
    assert [module for module in imports(path) if under(module, *impure)] == []


def test_the_runtime_knows_no_role() -> None:
    assert breaches("engine/runtime", "engine.workers") == []


def test_the_hybrid_actor_is_above_its_parts_and_below_the_controller() -> None:
    above = ("engine.controller", "engine.dataflows", "engine.trainers", "engine.cli", "ray")
    assert breaches("engine/runtime", *above) == []
    for part in ("parallel", "rollout", "models", "rewards", "data", "algorithms", "workers"):
        assert breaches(f"engine/{part}", "engine.runtime.hybrid_actor") == []


# What each of these may import of the rest; its command line (`__main__`) is exempt.
ABOVE = {
    "checkpoint": ("errors", "storage"),
    "planner": ("errors", "parallel", "controller.placement", "controller.launch"),
    "storage": ("errors", "console", "redaction", "worker_process"),
    "tracking": ("errors", "console", "redaction", "storage", "worker_process"),
    "lineage": ("errors", "redaction", "storage", "tracking", "checkpoint", "html_templates"),
    "samples": ("batch", "errors", "html_templates", "storage.filesystem"),
    "promotion": (
        *("errors", "config", "console", "storage", "lineage", "tracking", "evaluation"),
        *("data.rows", "models"),  # the size of one that decodes again
    ),
    "release": ("errors", "console", "redaction", "storage", "lineage", "evaluation"),
}


@pytest.mark.parametrize("room", ABOVE)
def test_a_room_knows_of_the_others_what_it_needs(room: str) -> None:
    known = tuple(f"engine.{name}" for name in (room, *ABOVE[room]))
    found = [
        f"{path.name} imports {module}"
        for path in sources(f"engine/{room}")
        if path.name != "__main__.py"
        for module in sorted(imports(path))
        if under(module, *OURS) and module != "engine" and not under(module, *known)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("room", "users"),
    [
        ("planner", ("engine.trainers.auto_placement", "engine.stages")),
        ("promotion", ("engine.stages",)),
        (
            "lineage",
            ("engine.promotion", "engine.release", "engine.runs", "engine.serve", "engine.stages"),
        ),
        ("release", ("engine.cli.commands.export",)),
        ("samples", ("engine.cli", "engine.runs", "engine.stages")),
        ("runs", ()),
        ("stages", ()),
    ],
)
def test_a_room_is_known_to_few(room: str, users: tuple[str, ...]) -> None:
    found = {
        module_name(path)
        for path in sources("engine")
        for module in imports(path)
        if under(module, f"engine.{room}")
    }
    others = sorted(user for user in found if not under(user, f"engine.{room}", *users))
    assert others == []


@pytest.mark.parametrize("room", ["planner", "promotion", "lineage", "release", "runs"])
def test_planning_and_lineage_compute_nothing(room: str) -> None:
    """They answer in a moment: no file of theirs loads what training needs."""
    heavy = ("torch", "transformers", "ray", "vllm", "peft")
    early = [
        f"{path.name} imports {module}"
        for path in sources(f"engine/{room}")
        for module in sorted(imports(path, at_import_time=True))
        if under(module, *heavy, "engine.trainers", "engine.workers", "engine.models")
    ]
    assert early == []


def test_vllm_loads_only_when_its_engine_is_asked_for() -> None:
    users = {
        module_name(path)
        for path in sources("engine")
        if any(under(module, "vllm") for module in imports(path))
    }
    assert all(under(user, "engine.rollout.vllm") for user in users), users
    early = [
        path.name
        for path in sources("engine")
        if any(under(m, "vllm") for m in imports(path, True))
    ]
    assert early == ["worker_extension.py"], "vLLM itself imports that"


def test_dataflows_know_neither_ray_nor_ranks() -> None:
    forbidden = ("ray", "torch.distributed", "engine.controller.ray_groups")
    assert breaches("engine/dataflows", *forbidden) == []


def test_the_controller_knows_no_algorithm() -> None:
    others = ("engine.algorithms", "engine.models", "engine.rollout")
    # What completions under way are: it takes them from one worker to another.
    assert breaches("engine/controller", *others, allowed=("engine.rollout.stream",)) == []


def test_workers_don_t_know_who_calls_them() -> None:
    above = ("engine.controller", "engine.dataflows", "engine.trainers", "ray")
    assert breaches("engine/workers", *above) == []


def test_ray_is_imported_only_where_groups_live_on_it() -> None:
    users = {
        module_name(path)
        for path in sources("engine")
        if any(under(module, "ray") for module in imports(path, at_import_time=True))
    }
    assert users == {"engine.controller.ray_groups"}


def test_ray_groups_load_only_when_ray_is_asked_for() -> None:
    users = {
        module_name(path)
        for path in sources("engine")
        if "engine.controller.ray_groups" in imports(path, at_import_time=True)
    }
    assert users == set()


def test_no_link_is_a_part_of_the_repository() -> None:
    """A worktree's link to an environment, once merged, takes the place of the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def calls(*words: str) -> list[tuple[str, ast.Call]]:
    """The calls, with their files, of all sources that have one of the words in them."""
    return [
        (str(path.relative_to(ROOT)), node)
        for folder in OURS
        for path in sources(folder)
        if any(word in (text := path.read_text()) for word in words)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
    ]


def test_every_load_by_transformers_refuses_a_folder_s_own_code() -> None:
    """Left open, transformers asks on the terminal, and a "y" runs it."""
    loads = [
        f"{file}: {ast.unparse(call)}"
        for file, call in calls("transformers", "vllm.LLM")
        if re.fullmatch(
            r"(Auto\w+|_loader\(folder\))\.from_(pretrained|config)|vllm\.LLM",
            ast.unparse(call.func),
        )
    ]
    assert len(loads) > 5
    assert [load for load in loads if "trust_remote_code=False" not in load] == []


def test_text_becomes_tokens_in_one_place() -> None:
    """`engine.data.templates` keeps what others wrote from becoming control tokens."""
    methods = r"encode|encode_plus|batch_encode_plus|__call__|tokenize"
    found = {
        f"{file}: {ast.unparse(call)}"
        for file, call in calls("tokenizer")
        if re.fullmatch(
            rf".*\.apply_chat_template|(.*\.)?_?tokenizer|.*tokenizer\.({methods})",
            ast.unparse(call.func),
        )
    }
    ours = {
        one
        for one in found
        if one.startswith(("engine/data/templates.py: ", "engine/data/chat_template.py: "))
    }
    assert ours
    assert found == ours
