"""The pipelines: which stages each has, in which order, for every front.

A front has the stages as its workflow engine's tasks: `tasks.stages` for flytekit 1 (through
`workflows.parts`), `workflows.flyte2.stages` for Flyte 2. Here they are called by name with a
plan's settings, so a stage that is added here, with its options in `engine.stages.pods`, is in
both; each front has to have a task of that name.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from engine.stages import interfaces
from engine.stages.stage import Artifact

# The inputs of a plan, beside its settings: what each is, and what it is by default.
INPUTS: Mapping[str, tuple[str, Any]] = {
    "source": ("Data source, arithmetic, gsm8k, math or files; empty: as in config.", ""),
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
CONFIG = "Settings: a YAML or JSON file, preset:NAME, or JSON text."
APPROVAL_TIMEOUT, APPROVED_BY = timedelta(days=7), "Flyte approval"


@dataclass(frozen=True)
class Pipeline:
    """A composition, and how it is offered on a command line.

    The body's inputs after the front and the plan are asked for after `model`. Its return
    annotation says what it gives: a file (`Path`) or a folder (`Artifact`).
    """

    body: Callable[..., Any]
    by_preferences: bool  # whether it has the input `preferences`
    preset: str  # what `config` is by default; empty: every setting's own default
    help: Mapping[str, str]  # of inputs; the rest as in `INPUTS`

    @property
    def name(self) -> str:
        return self.body.__name__

    @property
    def own_inputs(self) -> list[inspect.Parameter]:
        """The body's inputs beside the front and the plan."""
        return list(inspect.signature(self.body, eval_str=True).parameters.values())[2:]

    def bind(
        self, front: Any, inputs: Mapping[str, Any]
    ) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """Return what plans a run with these inputs, and what runs the stages of a plan."""
        own = {input.name for input in self.own_inputs}
        others = {name: value for name, value in inputs.items() if name not in own}
        plan = partial(front.plan, **{"preferences": "", **others}, workflow=self.name)
        given = {name: inputs[name] for name in own}
        return plan, lambda p: self.body(front, p, **given)

    def declare(
        self, composed: Callable[..., Any], module: str, config: Any, types: Mapping[type, Any]
    ) -> Callable[..., Any]:
        """Return `composed` with the name, inputs and description of a front's task in `module`.

        config: its default, whose type the input has. types: what the front has for a file (`Path`)
        and a folder (`Artifact`).
        """
        defaults = [("config", config)] + [(name, value) for name, (_, value) in INPUTS.items()]
        after_model = list(INPUTS).index("model") + 2
        defaults[after_model:after_model] = [(own.name, own.default) for own in self.own_inputs]
        types_of = {name: type(value) for name, value in defaults}
        if not self.by_preferences:
            del types_of["preferences"]
        gives = inspect.signature(self.body, eval_str=True).return_annotation
        signature = interfaces.signature(types_of, types[gives], **dict(defaults))
        texts = {name: text for name, (text, _) in INPUTS.items()} | {"config": CONFIG, **self.help}
        does, _, returns = (inspect.getdoc(self.body) or "").partition("\n\nReturns:")
        lines = [f"    {name}: {texts[name]}" for name in signature.parameters]
        returns = returns or "\n    The run's summary.json."
        about = "\n".join([f"{does}\n\nArgs:", *lines, f"\nReturns:{returns}"])
        return interfaces.declare(composed, self.name, module, signature, about)


def pipeline(
    *, by_preferences: bool = False, preset: str = "", **help: str
) -> Callable[[Callable[..., Any]], Pipeline]:
    """Decorate a composition of stages, `body(front, plan, …)`."""
    return lambda body: Pipeline(body, by_preferences, preset, help)


@pipeline()
def rlhf(front: Any, p: Any) -> Path:
    """Warm-start a model (unless `sft.skip`), improve it by RL, and promote it if it is better."""
    return improve_and_promote(front, p, *warm_start_of(front, p))


@pipeline(
    preset="guessing_agent",
    source="Data source of rows and demonstrations, guessing, products, python_tasks, files or "
    "your own; empty: as in config.",
    config=f"{CONFIG} The environment is rl.rollout.agent.environment.",
)
def agents(front: Any, p: Any) -> Path:
    """Warm-start a model on demonstrations, improve it by RL on episodes, promote it if better."""
    return improve_and_promote(front, p, *warm_start_of(front, p))


@pipeline(
    by_preferences=True,
    preferences=INPUTS["preferences"][0].replace("Pairs", "Pairs or labelled rows"),
)
def preference(front: Any, p: Any) -> Path:
    """Warm-start a model (unless `sft.skip`), train it on preferences, promote it if better."""
    dataset, warm_start = warm_start_of(front, p)
    audit = audit_of(front, p, dataset)
    settings = {"pairs_settings": p.pairs, "settings": p.preference}
    policy = front.learn_in_rounds(
        profile=p.profile, run=p.run, **settings, dataset=dataset, start=warm_start
    )
    return evaluate_and_promote(front, p, dataset, warm_start, policy, audit)


@pipeline(by_preferences=True)
def reward_model(front: Any, p: Any) -> Artifact:
    """Train a reward model on preferences; RL takes its folder as a reward.

    Returns:
        The reward model: a sequence-classification folder, or with head=likelihood a language
        model, with accuracy and calibration on held-out pairs in its manifest.
    """
    dataset, warm_start = warm_start_of(front, p)
    scorer, registered = reward_model_of(front, p, dataset, warm_start)
    done = front.finalize(run=p.run, artifact=scorer)
    front.in_order(registered, done)  # which ends the run
    return done


@pipeline(
    by_preferences=True,
    preset="classic_rlhf",
    config=f"{CONFIG} rl.reward is the true reward: it ranks rollouts where no preferences are "
    "given, and shows how far the reward model is over-optimised.",
)
def classic_rlhf(front: Any, p: Any) -> Path:
    """Warm start, reward model, PPO by it with a critic that starts from it, and promotion."""
    dataset, warm_start = warm_start_of(front, p)
    audit = audit_of(front, p, dataset)
    scorer, registered = reward_model_of(front, p, dataset, warm_start)
    start = {"dataset": dataset, "warm_start": warm_start, "reward_model": scorer}
    policy = front.rl(p.profile, run=p.run, settings=p.rl, **start)
    front.in_order(registered, policy)  # a registry that can't be written to is found before RL
    front.in_order(audit, policy)
    return evaluate_and_promote(front, p, dataset, warm_start, policy, audit)


@pipeline(
    model="The start model of the run whose problems these are; empty: as in config.",
    policy="Who writes: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.",
)
def make_pairs(front: Any, p: Any, policy: str = "models:/hybridflyte-policy@champion") -> Artifact:
    """Let a policy write pairs: the best and the worst of its completions, by a reward.

    Returns:
        The pairs artifact: train.parquet, validation.parquet and a card.
    """
    writer = front.fetch(run=p.run, reference=policy, name="policy")
    dataset = first(front.preprocess(run=p.run, settings=p.dataset))
    made = front.pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=writer)
    return front.finalize(run=p.run, artifact=made)


@pipeline(
    model="The start model of the run whose problems these are; empty: as in config.",
    candidate="The model to judge: models:/NAME@ALIAS, models:/NAME/VERSION, folder or address.",
    baseline="The model that it is compared with, written the same way.",
    seed="Seed of data and sampling; negative: as in config.",
    profile="Machines to run on.",
)
def evaluate_only(
    front: Any, p: Any, candidate: str = "models:/hybridflyte-policy@champion", baseline: str = ""
) -> Artifact:
    """Evaluate a model against another one.

    Returns:
        The evaluation artifact: report.html, comparison.json and a row a problem and model.
    """
    # First: whether they are there is known before the data are made.
    warm_start = front.fetch(run=p.run, reference=baseline, name="baseline")
    policy = front.fetch(run=p.run, reference=candidate, name="candidate")
    dataset = first(front.preprocess(run=p.run, settings=p.dataset))
    audit = audit_of(front, p, dataset)
    evaluation = evaluation_of(front, p, dataset, warm_start, policy, audit)
    return front.finalize(run=p.run, artifact=evaluation)


# Parts of them.


def retrain_champion(front: Any, p: Any) -> Any:
    """Train the champion of a retraining plan on the new data, evaluate, promote by the rules."""
    start = front.fetch(run=p.run, reference=p.champion, name="champion")
    dataset = first(front.ingest(run=p.run, settings=p.ingest, champion=start))
    return improve_and_promote(front, p, dataset, start)


def warm_start_of(front: Any, p: Any) -> tuple[Any, Any]:
    """Make the dataset of a plan and the warm start, or with `sft.skip` the start model."""
    dataset = first(front.preprocess(run=p.run, settings=p.dataset))
    return dataset, front.sft(p.sft_profile, run=p.run, settings=p.sft, dataset=dataset)


def reward_model_of(front: Any, p: Any, dataset: Any, policy: Any) -> tuple[Any, Any]:
    """Train a reward model of the policy's backbone, and promote it in the registry."""
    made = front.pairs(p.profile, run=p.run, settings=p.pairs, dataset=dataset, policy=policy)
    model = front.reward_model_training(
        p.profile, run=p.run, settings=p.reward_model, pairs=made, policy=policy
    )
    registered = front.reward_model_promotion(
        p.profile, run=p.run, settings=p.reward_model_gate, pairs=made, reward_model=model
    )
    return model, registered


def audit_of(front: Any, p: Any, dataset: Any) -> Any:
    """Audit the scorers of a plan."""
    return front.reward_audit(p.audit_profile, run=p.run, settings=p.reward_audit, dataset=dataset)


def improve_and_promote(front: Any, p: Any, dataset: Any, warm_start: Any) -> Any:
    """Audit the reward, train by RL from the warm start, and promote the policy if it is better."""
    audit = audit_of(front, p, dataset)
    policy = front.rl(p.profile, run=p.run, settings=p.rl, dataset=dataset, warm_start=warm_start)
    front.in_order(audit, policy)
    return evaluate_and_promote(front, p, dataset, warm_start, policy, audit)


def evaluate_and_promote(
    front: Any, p: Any, dataset: Any, warm_start: Any, policy: Any, audit: Any
) -> Any:
    """Evaluate, promote and report a policy."""
    evaluation = evaluation_of(front, p, dataset, warm_start, policy, audit)
    promotion = front.gate(p, dataset, policy, evaluation)
    made = {"dataset": dataset, "warm_start": warm_start, "policy": policy}
    made |= {"evaluation": evaluation, "promotion": promotion}
    return front.report(run=p.run, config_digest=p.config_digest, **made)


def evaluation_of(
    front: Any, p: Any, dataset: Any, warm_start: Any, policy: Any, audit: Any
) -> Any:
    """Compare a policy with what it started from."""
    made = {"dataset": dataset, "warm_start": warm_start, "policy": policy, "audit": audit}
    return first(front.evaluate(p.profile, run=p.run, settings=p.evaluation, **made))


def first(made: Any) -> Any:
    """Return the artifact of a stage that hands on tables beside it."""
    return made[0] if isinstance(made, tuple) else made
