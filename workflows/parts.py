"""What several workflows have in common: their inputs, and parts to be called in them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from flytekit import workflow

from tasks import stages
from tasks.inputs import RLHFConfig
from workflows.approval import gate

# The inputs of a plan: what each is, and what it is by default.
INPUTS: Mapping[str, tuple[str, Any]] = {
    "config": ("Settings: a YAML or JSON file, preset:NAME, or JSON text.", RLHFConfig()),
    "source": ("Data source, arithmetic, gsm8k or files; empty: as in config.", ""),
    "path": ("File, folder, s3:// prefix or hub id of the data; empty: as in config.", ""),
    "model": ("Hugging Face model folder to start from; empty: as in config.", ""),
    "preferences": (
        "Pairs: file, folder, s3://… or hf://ID; empty: as in config, where empty means that the "
        "policy writes them and rl.reward ranks them.",
        "",
    ),
    "seed": ("Seed of data, weights and sampling; negative: as in config.", -1),
    "profile": (
        "Machines to run on; without a layout in config, also how the model is sharded.",
        "laptop",
    ),
}


def pipeline(
    on_failure: Any,
    *,
    by_preferences: bool = False,
    settings: RLHFConfig = RLHFConfig(),  # noqa: B008 (frozen)
    **help: str,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate what is done with a plan: make it a workflow, whose inputs are those of the plan.

    Inputs of the function's own, beside the plan, are asked for after `model`.

    by_preferences: whether it has the input `preferences`.
    settings: what `config` is by default.
    help: what inputs are, for the command line; the rest as in `INPUTS`.
    """
    defaults = {name: default for name, (_, default) in INPUTS.items()} | {"config": settings}
    if not by_preferences:
        del defaults["preferences"]

    def make(body: Callable[..., Any]) -> Any:
        signature = inspect.signature(body, eval_str=True)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        extra = list(signature.parameters.values())[1:]
        parameters = [
            inspect.Parameter(name, kind, default=value, annotation=type(value))
            for name, value in defaults.items()
        ]
        after_model = list(defaults).index("model") + 1
        parameters[after_model:after_model] = extra

        @functools.wraps(body)
        def composed(**inputs: Any) -> Any:
            others = {parameter.name: inputs.pop(parameter.name) for parameter in extra}
            return body(stages.plan(**inputs, workflow=body.__name__), **others)

        signature = signature.replace(parameters=parameters)
        composed.__signature__ = signature  # type: ignore[attr-defined]
        composed.__annotations__ = {p.name: p.annotation for p in parameters}
        composed.__annotations__["return"] = signature.return_annotation
        texts = {name: text for name, (text, _) in INPUTS.items()} | help
        lines = [f"    {parameter.name}: {texts[parameter.name]}" for parameter in parameters]
        description, _, returns = (inspect.getdoc(body) or "").partition("\n\nReturns:")
        composed.__doc__ = "\n".join([f"{description}\n\nArgs:", *lines, f"\nReturns:{returns}"])
        return workflow(composed, on_failure=on_failure)

    return make


def warm_start_of(p: Any) -> tuple[Any, Any]:
    """Make the dataset of a plan and the warm start, or with `sft.skip` the start model."""
    dataset = stages.preprocess(run=p.run, settings=p.dataset).dataset
    return dataset, stages.sft(p.sft_profile, run=p.run, settings=p.sft, dataset=dataset)


def reward_model_of(p: Any, dataset: Any, policy: Any) -> tuple[Any, Any]:
    """Train a reward model of the policy's backbone, and promote it in the registry."""
    made = stages.pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=policy)
    model = stages.reward_model_training(
        p.profile, run=p.run, settings=p.reward_model, pairs=made, policy=policy
    )
    registered = stages.reward_model_promotion(
        p.profile, run=p.run, settings=p.reward_model_gate, pairs=made, reward_model=model
    )
    return model, registered


def audit_of(p: Any, dataset: Any) -> Any:
    """Audit the scorers of a plan."""
    return stages.reward_audit(p.audit_profile, run=p.run, settings=p.reward_audit, dataset=dataset)


def improve_and_promote(p: Any, dataset: Any, warm_start: Any) -> Any:
    """Audit the reward, train by RL from the warm start, and promote the policy if it is better."""
    audit = audit_of(p, dataset)
    policy = stages.rl(p.profile, run=p.run, settings=p.rl, dataset=dataset, warm_start=warm_start)
    audit >> policy
    return evaluate_and_promote(p, dataset, warm_start, policy, audit)


def evaluate_and_promote(p: Any, dataset: Any, warm_start: Any, policy: Any, audit: Any) -> Any:
    """Evaluate, promote and report a policy."""
    evaluation = stages.evaluate(
        p.profile,
        run=p.run,
        settings=p.evaluation,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        audit=audit,
    ).evaluation
    promotion = gate(p, dataset, policy, evaluation)
    return stages.report(
        run=p.run,
        config_digest=p.config_digest,
        dataset=dataset,
        warm_start=warm_start,
        policy=policy,
        evaluation=evaluation,
        promotion=promotion,
    )
