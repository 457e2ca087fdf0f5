"""What is used of vLLM's private code is in the vLLM that is installed, and is listed."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rollout_models import build

import engine
from engine.rollout.vllm.options import argument_names, engine_arguments, resolve

# Parameters of what is replaced, which the replacements have, too.
REPLACED = {
    "model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    "model_executor.layers.fused_moe.experts.cpu_moe:"
    "CPUUnquantizedExperts.process_weights_after_loading": "self layer",
    "model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts.apply": (
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
        "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
        "apply_router_weight_on_input"
    ),
    "v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context": "self tag",
    "v1.sample.ops.logprobs:batched_count_greater_than": "x values",
    "v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args": "self",
    "v1.executor.uniproc_executor:UniProcExecutor.shutdown": "self",
}
# Parameters that are given by name or place, others having defaults.
CALLED = {
    "v1.engine.llm_engine:LLMEngine.add_request": "request_id prompt params lora_request",
    "v1.engine.llm_engine:LLMEngine.reset_prefix_cache": "reset_running_requests",
    "v1.engine.llm_engine:LLMEngine.abort_request": "request_ids",
    "v1.engine.llm_engine:LLMEngine.sleep": "level",
    "v1.engine.llm_engine:LLMEngine.wake_up": "tags",
    "distributed.parallel_state:init_model_parallel_group": (
        "group_ranks local_rank backend group_name"
    ),
    "config.vllm:set_current_vllm_config": "vllm_config",
    "lora.lora_model:LoRAModel.from_lora_tensors": (
        "lora_model_id tensors peft_helper device dtype weights_mapper"
    ),
    "lora.model_manager:LoRAModelManager.activate_adapter": "lora_id",
    "lora.peft_helper:PEFTHelper.validate_legal": "lora_config",
}

LIST = Path(engine.__file__).parent / "rollout" / "vllm" / "private_names.yaml"
PATCHED, USED = yaml.safe_load(LIST.read_text()).values()
SPEC = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(SPEC is None, reason="vLLM is not installed")


def names_of(tree: ast.AST) -> Iterator[str]:
    """What the body of a module or class defines or imports, and what its methods set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def owner_of(name: str) -> tuple[ast.AST, str]:
    """The module or class that has it, and its own name there."""
    assert SPEC is not None
    assert SPEC.origin is not None
    module, _, path = name.partition(":")
    file = Path(SPEC.origin).parent.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    tree: ast.AST = ast.parse(file.read_text())
    *classes, last = path.split(".")
    for owner in classes:
        tree = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == owner)
    return tree, last


@pytest.mark.parametrize("name", [*PATCHED, *USED])
def test_vllm_has_it(name: str) -> None:
    tree, last = owner_of(name)
    assert last in set(names_of(tree)), f"vLLM has no {name}; see {LIST.name}"


@pytest.mark.parametrize("name", [*REPLACED, *CALLED])
def test_vllm_s_functions_have_the_parameters_that_are_relied_on(name: str) -> None:
    tree, last = owner_of(name)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == last]
    arguments = functions[0].args
    places = [argument.arg for argument in arguments.args]
    if name in REPLACED:
        assert [*places, *(a.arg for a in arguments.kwonlyargs)] == REPLACED[name].split()
        return
    given = CALLED[name].split()
    assert set(given) <= {*places, *(a.arg for a in arguments.kwonlyargs)}
    required = places[: len(places) - len(arguments.defaults)]
    assert set(required) - {"self", "cls"} <= set(given)


def test_vllm_takes_the_arguments_that_it_is_given() -> None:
    options = resolve(build("qwen2"), kv_cache_memory_mb=32)
    options = replace(options, routed_layers=(0,), adapter_rank=8)
    given = {*engine_arguments(options), *engine_arguments(replace(options, on_gpu=True))}
    given |= {"worker_extension_cls", "max_lora_rank", "enable_sleep_mode", "quantization"}
    assert "enable_return_routed_experts" in given
    assert given <= argument_names()


def test_all_imports_of_vllm_s_modules_are_listed() -> None:
    """But for the package's own names, its public API, and modules that a listed name is in."""
    listed = {f"vllm.{name.replace(':', '.')}" for name in (*PATCHED, *USED)}
    missing = []
    for file in Path(engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found = any(f"{entry}.".startswith(f"{name}.") for entry in listed)
                    if not found and not any(e.endswith(f".{alias.name}") for e in listed):
                        missing.append((file.name, name))
    assert not missing
