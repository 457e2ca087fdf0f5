"""`--help` and `--print-config`: the settings as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import yaml
from pydantic import BaseModel

from engine.cli.renamed_keys import VERL, Key
from engine.cli.reward_keys import REWARD_FILES
from engine.cli.settings import RunConfig
from engine.cli.unsupported_keys import UNSUPPORTED
from engine.config.reference import Setting, as_yaml, sections, summary

WIDTH = 100
_USAGE = """\
python -m engine.main_ppo [FILE.yaml] [--verl-defaults] [--print-config] [--dry-run] [key=value ...]

Reinforcement learning on your own prompts: from a Hugging Face folder to a better one.

  python -m engine.main_ppo data.train_files=train.parquet data.val_files=test.parquet \\
      actor_rollout_ref.model.path=/models/Qwen2.5-0.5B actor_rollout_ref.actor.optim.lr=1e-6 \\
      algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 trainer.total_epochs=1

  FILE.yaml        YAML with the same keys, as sections or dotted; key=value overrides it. As well
                   --config FILE, or Hydra's --config-path and --config-name
  --verl-defaults  what is not set is as in verl's configuration, not as listed here. So does
                   python -m engine.trainer.main_ppo, for command lines of verl's
  --print-config   print the configuration as --config reads it, and exit
  --dry-run        check settings and data; print the configuration, batches, placement, and what
                   memory and time are estimated (for --gpu H100 as well), and exit
  --help           print this, and exit

Keys are verl's where verl has the same thing. Beside them, each setting has this project's own
path (as in engine/config/), with or without `rl.` in front: rl.actor.optim.lr, actor.optim.lr.
Values are YAML: true, 1e-6, [a,b], null (the default). The defaults are this project's, made for
small models, and not verl's: give a pretrained model its own learning rate. trainer.n_gpus_per_node
and trainer.nnodes are the ranks; without them there is one, or those of rl.actor.parallel.

Exit status: 0; 1 for a run that failed; 2 for wrong input; 130 for Ctrl-C.
"""


def help_text() -> str:
    """All sections with their keys, defaults and meanings, and verl's unsupported keys."""
    names = _verl_names()
    parts = [_USAGE, *sections_text(RunConfig, names)]
    files = "\n".join(
        _entry(f"{p}.path, .name, .reward_kwargs", "", "File, function, its arguments: rl.reward")
        for p in REWARD_FILES
    )
    files += "\n" + _entry(
        "reward_model.enable, .model.path", "", "A sequence-classification folder: rl.reward"
    )
    parts.append(f"reward from a file:\n{files}\n")
    parts.append(
        "\n".join(
            [
                "verl's keys that have no effect here, or only some values (null: any)",
                *_unsupported(),
                "",
            ]
        )
    )
    return "\n".join(parts)


def sections_text(
    root: type[BaseModel], names: Mapping[str, tuple[str, Key]] | None = None
) -> Iterator[str]:
    """The sections of a configuration; `names`: the keys that paths are shown as."""
    for path, model, settings in sections(root):
        rows = list(_rows(settings, names or {}))
        if rows:
            yield "\n".join([f"{path or 'top level'}: {summary(model)}", *rows, ""])


def config_text(config: RunConfig) -> str:
    """The whole configuration as YAML that `--config` reads."""
    values = config.model_dump(mode="json")
    if config.run.total_epochs is not None:
        del values["rl"]["trainer"]["total_training_steps"]  # known when the data are read
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _rows(settings: list[Setting], names: Mapping[str, tuple[str, Key]]) -> Iterator[str]:
    for setting in settings:
        key, target = names.get(setting.path, (setting.path.removeprefix("rl."), None))
        texts = [setting.about, setting.choices, target.note if target else ""]
        yield _entry(key, setting.default, "; ".join(part for part in texts if part))


def _entry(key: str, default: str, about: str) -> str:
    head = f"  {key}" + (f" = {default}" if default else "")
    wrapped = textwrap.wrap(about, WIDTH - 56) or [""]
    first = f"{head:<56}{wrapped.pop(0)}" if len(head) <= 54 else head
    return "\n".join([first.rstrip(), *(" " * 56 + line for line in wrapped if line)])


def _unsupported() -> Iterator[str]:
    for entry in UNSUPPORTED:
        only = f" (only {', '.join(map(as_yaml, entry.accepted))})" if entry.accepted else ""
        kind = "rejected" if entry.rejected else "no effect"
        yield _entry(entry.pattern + only, "", f"{kind}: {entry.reason}")


def _verl_names() -> dict[str, tuple[str, Key]]:
    """The verl key to show for a path; the first of the table where there are several."""
    names: dict[str, tuple[str, Key]] = {}
    for name, key in VERL.items():
        for path in (key.path,) if isinstance(key.path, str) else ():
            names.setdefault(path, (name, key))
    return names
