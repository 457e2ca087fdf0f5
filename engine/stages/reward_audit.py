"""The stage `reward_audit`: whether the scorers of a run can be fooled, before RL learns from them.

`evaluate` records what it found, the report shows it, and `promote.require_reward_audit` asks it.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from engine.console import say
from engine.errors import LineageError, RewardError
from engine.evaluation.summary import read_problems
from engine.registry import import_plugins
from engine.rewards import audit as audits
from engine.stages.settings import RewardAuditSettings, RunContext
from engine.stages.stage import Artifact, host, show_facts, stage
from engine.storage.artifacts import Parent, local_path, read_manifest

FILE = "reward_audit.json"
KIND = "reward_audit"


def reward_audit(run: RunContext, settings: RewardAuditSettings, dataset: Artifact) -> Artifact:
    """Audit each scorer of the run on rows of its dataset.

    Artifact `reward_audit`: `reward_audit.json`, an `engine.rewards.audit.RewardAudit` of each.
    Raises RewardError where a hole was found and `settings.required`: nothing could be promoted.
    """
    recorded = settings.model_dump(mode="json")
    with stage(KIND, run, recorded) as this:
        folder = this.load_parent("dataset", dataset)
        import_plugins(settings.plugins)
        frames = [pd.read_parquet(folder / "train.parquet"), *read_problems(folder).values()]
        # Of each source as many rows of training as of each test set, the first ones.
        heads = [frame.groupby("data_source", sort=False).head(audits.ROWS) for frame in frames]
        table = [row for head in heads for row in head.to_dict("records")]
        rows = audits.reward_rows([{str(k): v for k, v in row.items()} for row in table])
        by_scorer: dict[str, audits.RewardAudit] = {}
        for name, config in settings.rewards.items():
            audit = audits.audit_scorer(
                config, rows, plugins=settings.plugins, code=settings.code[name]
            )
            by_scorer[name] = audit
            say(f"{KIND}: {name}: {audit.sentence()}")
            facts = {f"{c.name} {c.source}": f"{c.severity}: {c.found}" for c in audit.checks}
            show_facts(f"Reward audit ({name})", {"outcome": audit.sentence(), **facts})
            this.tracked.set_tags({f"reward_audit.{name}": audit.sentence()})
        (this.folder / FILE).write_text(audits.to_json(by_scorer))
        failed = [f"{n}: {a.sentence()}" for n, a in by_scorer.items() if not a.passed]
        if failed:
            checks = [check for audit in by_scorer.values() for check in audit.checks]
            fooled = (c for c in checks if c.severity == "hole" and c.truth)
            shown = [f"{c.completion!r} counts as right where {c.truth!r} is" for c in fooled][:1]
            example = "".join(f" (for example {text})" for text in shown)
        if failed and settings.required:
            host().publish_pages()
            raise RewardError(
                f"the reward audit found holes ({'; '.join(failed)}), and "
                f"promote.require_reward_audit is set; correct the scorer{example}"
            )
        if failed:
            say(
                f"{KIND}: the run goes on, as promote.require_reward_audit is false{example}; its "
                "report will have an example of each hole"
            )
        holes = sum(len(audit.names("hole")) for audit in by_scorer.values())
        return this.publish({"passed": float(not failed), "holes": float(holes)})


def audit_folder(parents: Iterable[Parent]) -> dict[str, Path]:
    """The folder of the audit among what an evaluation was made from, as `reward_audit`, if any."""
    return {parent.kind: local_path(parent.uri) for parent in parents if parent.kind == KIND}


def read_audits(folder: Path) -> dict[str, audits.RewardAudit]:
    """The audits of an artifact, by who scores."""
    return audits.from_json((folder / FILE).read_bytes(), str(folder / FILE))


def audit_record(folder: Path, dataset: Parent) -> list[dict[str, object]]:
    """What an evaluation on `dataset` records of an audit; LineageError for other data's."""
    parents = {parent.name: parent.digest for parent in read_manifest(folder).parents}
    if parents.get("dataset") != dataset.digest:
        raise LineageError(
            f"the reward audit {folder} is of dataset {parents.get('dataset', '?')[:12]}, and "
            f"this evaluation of {dataset.digest[:12]}; give the artifacts of one run"
        )
    return [audit.record() for audit in read_audits(folder).values()]
