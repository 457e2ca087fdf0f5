"""Preferences of a policy's own completions or of files, and RL by a learned reward."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from engine.config import DataConfig, EvaluateConfig, PairsConfig, RewardSpec, RLConfig
from engine.data import contract, preference_rows
from engine.data.decontamination import HeldOut, question_text
from engine.data.rows import is_filled, normalise, prompt_text
from engine.data.sources import draw_key
from engine.data.templates import encode_prompts, encode_response
from engine.dataflows import choose_dataflow
from engine.errors import DataError, ModelError
from engine.evaluation.decode import decode_passes
from engine.evaluation.policy_steps import MODEL_REWARD
from engine.evaluation.results import Judged
from engine.evaluation.scoring import judge_answers, scorer_inputs
from engine.models.loading import load_model_config
from engine.registry import import_plugins
from engine.rewards import Scorer, resolve_reward
from engine.rewards.reward_function import declared_components
from engine.rewards.scorer import ANSWER
from engine.rollout.protocol import SamplingParams
from engine.runtime.policy_runtime import open_tokenizer


def by_reward_model(config: RLConfig, folder: str) -> RLConfig:
    """The settings of RL with the reward model in `folder` as the only reward that counts.

    A classifier's score is its logit, a language model's the completion's log-prob. The configured
    reward, the true one, is measured beside it with weight 0, and says which completions are right.
    A critic starts from the reward model, unless `critic.model_path` names another.
    """
    true_reward, components = config.reward, dict.fromkeys(config.reward.components, 0.0)
    for spec in (true_reward, *true_reward.sources.values()):
        components |= dict.fromkeys(declared_components(spec.name) or (ANSWER,), 0.0)
    name = reward_of(folder)
    model = RewardSpec(name=name, options={"model": folder})
    reward = true_reward.model_copy(
        update={
            "components": {**true_reward.components, MODEL_REWARD: model},
            "weights": components | {MODEL_REWARD: 1.0},
        }
    )
    changes: dict[str, object] = {"reward": reward}
    if "critic" in choose_dataflow(config.algorithm).roles and not config.critic.model_path:
        changes["critic"] = config.critic.model_copy(update={"model_path": folder})
    return config.model_copy(update=changes)


def reward_of(folder: str) -> str:
    """The name of the reward that scores by the reward model in `folder`."""
    kinds: list[str] = []
    with suppress(ModelError):  # loading it says what is wrong
        kinds = load_model_config(folder).architectures or []
    return "likelihood" if any(kind.endswith("ForCausalLM") for kind in kinds) else "reward_model"


def ranked_right(folder: str | Path, pairs: pd.DataFrame) -> np.ndarray:
    """Whether each of N pairs' chosen response has the higher score, as in RL, `[N]` bool.

    Equal scores are no right ranking. Raises RewardError for a folder that is no reward model.
    """
    reward: Callable[..., object] = resolve_reward(reward_of(str(folder)), {"model": str(folder)})
    messages = [[dict(message) for message in prompt] for prompt in pairs["prompt"]]
    prompts = [prompt[-1]["content"] for prompt in messages]
    chosen, rejected = (
        np.asarray(reward(prompts, list(pairs[side]), messages=messages))
        for side in ("chosen", "rejected")
    )
    return chosen > rejected


@dataclass(frozen=True, slots=True)
class PreferenceTables:
    """The rows to learn from, and those that are held out."""

    train: pd.DataFrame  # prompt, chosen, rejected, margin; or prompt, completion, label
    validation: pd.DataFrame  # may be empty
    notes: tuple[str, ...]  # what was left out, a sentence each


def read_preference_tables(
    config: PairsConfig,
    data: DataConfig,
    kind: preference_rows.Kind,
    held_out: Iterable[str | Sequence[Mapping[str, object]]],
    seed: int,
) -> PreferenceTables:
    """Read `config.path`; `held_out` are prompts that must not be trained on, which are left out.

    Rows are put as `data.system_prompt` and `data.apply_chat_template_kwargs` say, too. Raises
    DataError for bad rows unless they are dropped, and where nothing is left to learn from.
    """
    settings = data.model_copy(
        update={name: getattr(config, name) for name in ("columns", "templates", "bad_rows")}
    )
    files = preference_rows.read_preference_rows([config.path], settings, kind)
    notes = [note for file in files for note in file.notes]
    rows = [row for file in files for row in file.rows]
    test_prompts = HeldOut(data.decontaminate.ngram, data.decontaminate.overlap)
    for prompt in held_out:
        test_prompts.add(question_text(prompt))
    usable = [row for row in rows if not test_prompts.find(question_text(row["prompt"]))]
    if len(usable) < len(rows):
        left_out = len(rows) - len(usable)
        notes.append(f"{left_out} rows have prompts of a test set, and are left out")
    prompts = [normalise(prompt_text(row["prompt"])) for row in usable]
    apart = _held_out_prompts(prompts, config.validation_size, seed)
    sides: tuple[list[object], list[object]] = ([], [])
    for prompt, row in zip(prompts, usable, strict=True):
        sides[prompt in apart].append(row)
    if not sides[0]:
        raise DataError(
            f"pairs.path={config.path!r} leaves no row to learn from: {len(rows)} rows, "
            f"{len(rows) - len(usable)} of them with prompts of a test set; give more, or lower "
            f"pairs.validation_size={config.validation_size}"
        )
    return PreferenceTables(pd.DataFrame(sides[0]), pd.DataFrame(sides[1]), tuple(notes))


def _held_out_prompts(prompts: Iterable[str], size: int, seed: int) -> set[str]:
    """Prompts to hold out, drawn by seed: those of `size` rows, or of a few more."""
    rows, apart = Counter(prompts), set[str]()
    for prompt in sorted(rows, key=lambda prompt: draw_key(f"{seed}/{prompt}")):
        if size <= 0:
            break
        apart.add(prompt)
        size -= rows[prompt]
    return apart


def layout_of(config: PairsConfig) -> EvaluateConfig:
    """How the policy is sampled from, in the terms of an evaluation."""
    return EvaluateConfig(engine=config.engine, parallel=config.parallel)


def is_usable(completion: Judged) -> bool:
    """Whether a completion has a score and an end that can be learned, and a file can hold it."""
    text, score = completion.text, completion.score
    scored = not completion.failed and not math.isnan(score)
    return scored and not completion.truncated and is_filled(text) and "\0" not in text


def rank_rollouts(
    folder: str | Path,
    rows: pd.DataFrame,
    config: PairsConfig,
    kind: preference_rows.Kind = "pairs",
    *,
    max_response_length: int,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> tuple[pd.DataFrame, dict[str, float]]:
    """Sample `config.n` completions of each prompt of RL rows, score them, and rank them.

    Returns rows (`data.contract`) and metrics of the rollouts. A pair is the best and the worst of
    them; its `margin`, which a reward model's loss would use, is 0. With labels, right ones are
    good. Several GPUs of this machine, or `config.parallel`, share the prompts.
    `on_progress(n)` is called with the number of finished completions. Raises what `decode_passes`
    and the scorer raise.
    """
    import_plugins(config.plugins)
    tokenizer = open_tokenizer(folder)
    prompts = encode_prompts(tokenizer, rows["prompt"], "train")
    n, per_prompt, temperature = config.n, config.pairs_a_prompt, config.temperature
    params = SamplingParams(
        n=n, max_new_tokens=max_response_length, temperature=temperature, seed=seed
    )
    questions, columns = scorer_inputs(rows, prompts)
    with closing(Scorer(config.scorer, config.plugins)) as scorer:
        (answers,) = decode_passes(
            folder, prompts, (params,), layout_of(config), on_progress=on_progress
        )
        judged = judge_answers(scorer, tokenizer, answers, questions, columns, n)
    usable = [[c for c in judged[i : i + n] if is_usable(c)] for i in range(0, len(judged), n)]
    groups = []
    for i, (prompt, completions) in enumerate(zip(rows["prompt"], usable, strict=True)):
        scores: dict[str, float] = {}
        firsts: dict[tuple[int, ...], str] = {}  # of texts that are the same tokens the first
        for completion in completions:
            score = float(completion.correct) if kind == "labels" else completion.score
            ids = tuple(encode_response(tokenizer, completion.text))
            scores.setdefault(firsts.setdefault(ids, completion.text), score)
        groups.append(preference_rows.ScoredGroup(prompt, scores, {"row": i}))
    ranked = (
        preference_rows.labels_from_groups(groups, per_group=per_prompt)
        if kind == "labels"
        else preference_rows.pairs_from_groups(
            groups, pairs_per_group=per_prompt, min_gap=config.margin
        )
    )
    with_row = {row["extra_info"]["row"] for row in ranked}
    metrics: dict[str, float] = {
        "prompts": len(groups),
        "prompts_without_pair": len(groups) - len(with_row),  # e.g. as all are worth the same
        "completions_unusable": len(judged) - sum(map(len, usable)),
        "score_mean": fmean(completion.score for completion in judged),
        "correct": fmean(completion.correct for completion in judged),
    }
    metrics = {name: float(value) for name, value in metrics.items()}
    schema = contract.KTO_ROWS if kind == "labels" else contract.PREFERENCE_PAIRS
    return pd.DataFrame(ranked, columns=list(schema.columns)), metrics
