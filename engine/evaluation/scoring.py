"""Evaluate a model folder on a split: decode, judge by the run's scorer, one row a problem.

Completions are judged by their texts and the rows they answer; episodes also by the rewards and
replies of their environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from engine.agents.episode import EpisodeSummary
from engine.config import EvaluateConfig
from engine.data.collate import collate_prompts
from engine.data.rows import answered_messages
from engine.data.templates import encode_prompts, turn_text
from engine.errors import ConfigError, DataError
from engine.evaluation.decode import Answer, decode_passes
from engine.evaluation.results import Judged, ModelName, build_rows, problem_rows
from engine.evaluation.summary import TEST
from engine.registry import import_plugins
from engine.rewards import Scorer
from engine.rewards.answers import ENVIRONMENT
from engine.rollout.protocol import SamplingParams
from engine.runtime.policy_runtime import open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 256  # completions in one call of the scorer, which has a deadline


def judge(
    scorer: Scorer,
    completions: Sequence[tuple[str, int, bool]],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[Judged]:
    """Judge B completions to B prompts (the texts of their last messages), with B of each column.

    A completion is its text, its tokens, and whether it is at the limit of tokens. One that can't
    be scored is wrong, and marked; with `on_error: fail` RewardError is raised.
    """
    judged: list[Judged] = []
    on_error = "fail" if scorer.config.on_error == "fail" else "zero"
    for start in range(0, len(completions), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some = {name: values[part] for name, values in columns.items()}
        texts = [text for text, *_ in completions[part]]
        scores = scorer.score(prompts[part], texts, some, on_error, first_row=start)  # type: ignore[arg-type]
        sources = some.get("data_source", [""] * len(texts))
        answers, readable = scorer.answers(texts, sources, some)
        right, totals = scorer.correct(scores, sources), scorer.totals(scores)
        names = scores.components or ()
        well_formed = scorer.well_formed(texts, sources) or [True] * len(texts)
        if "format" in names:  # where it applies; else the rewards' rules say what keeps the format
            forms = [row[names.index("format")] for row in scores.rows]
            pairs = zip(forms, well_formed, strict=True)
            well_formed = [ok if isnan(form) else form >= 1 for form, ok in pairs]
        judged += [
            Judged(
                text=text,
                tokens=tokens,
                truncated=truncated,
                correct=right[i],
                score=totals[i],
                answer=answers[i],
                vote=answers[i] if readable else text.strip(),
                well_formed=well_formed[i],
                failed=i in scores.failures,
            )
            for i, (text, tokens, truncated) in enumerate(completions[part])
        ]
    return judged


def judge_episodes(
    scorer: Scorer,
    episodes: Sequence[EpisodeSummary],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[Judged]:
    """Judge B episodes of B prompts (the texts of their last messages), as RL rewards them.

    With `reward.name=environment` an episode's `info`, or else a return of 1 or more, says whether
    it succeeded. Another reward judges the last turn, and the environment's are added to its score.
    """
    by_environment = scorer.config.name == ENVIRONMENT
    judged = judge(
        scorer,
        [(episode.answer, episode.tokens, episode.truncated) for episode in episodes],
        prompts,
        {**columns, "episode_reward": [episode.reward for episode in episodes]},
    )
    for i, (row, episode) in enumerate(zip(judged, episodes, strict=True)):
        right = episode.success if by_environment and episode.success is not None else row.correct
        judged[i] = replace(
            row,
            text=episode.text,
            correct=right and not episode.failed,
            score=row.score if by_environment else row.score + episode.reward,
            answer=row.answer if row.answer is not None else episode.answer,
            failed=row.failed or episode.failed,
            episode=episode,
        )
    return judged


def evaluate_model(
    folder: str | Path,
    problems: pd.DataFrame | Mapping[str, pd.DataFrame],
    name: ModelName,
    config: EvaluateConfig,
    *,
    max_response_length: int,
    max_prompt_length: int = 0,
    seed: int,
    part: tuple[int, int] = (0, 1),
    on_progress: Callable[[int], None] | None = None,
) -> pd.DataFrame:
    """Decode each problem, or run its episode, once greedily and `config.samples` times sampled.

    `problems` are RL rows by evaluation set, or those of the set `test` alone. Returns the table of
    `engine.evaluation.results`, set by set. `on_progress(n)` gets the number of finished
    completions. `part` is (which, of how many) consecutive shares of the problems. Raises DataError
    for a set without rows, ConfigError for a part without problems, and as `decode_passes` does.
    """
    sets = {TEST: problems} if isinstance(problems, pd.DataFrame) else dict(problems)
    n = config.samples
    sampling = SamplingParams(
        n=n, max_new_tokens=max_response_length, temperature=config.temperature, seed=seed
    )
    passes = (replace(sampling, n=1, temperature=0.0), sampling)
    greedy, sampled = _answer(folder, sets, passes, config, max_prompt_length, part, on_progress)
    groups = [sampled[i : i + n] for i in range(0, len(sampled), n)]
    table = problem_rows(sets)
    table = table.iloc[share_of(len(table), part)].reset_index(drop=True)
    return build_rows(name, table, greedy, groups)


def answer_greedily(
    folder: str | Path,
    problems: Mapping[str, pd.DataFrame],
    config: EvaluateConfig,
    *,
    max_response_length: int,
    max_prompt_length: int = 0,
    seed: int,
) -> list[Judged]:
    """Decode each problem greedily alone, as `evaluate_model` does, and judge it; set by set."""
    params = SamplingParams(max_new_tokens=max_response_length, temperature=0.0, seed=seed)
    return _answer(folder, problems, (params,), config, max_prompt_length)[0]


def _answer(
    folder: str | Path,
    sets: Mapping[str, pd.DataFrame],
    passes: Sequence[SamplingParams],
    config: EvaluateConfig,
    max_prompt_length: int,
    part: tuple[int, int] = (0, 1),
    on_progress: Callable[[int], None] | None = None,
) -> list[list[Judged]]:
    """Decode a part of the problems in each pass, and judge the completions, by pass."""
    frame = _joined(sets)
    import_plugins(config.plugins)
    tokenizer = open_tokenizer(folder)
    prompts = encode_prompts(tokenizer, frame["prompt"], "test")
    longest, share = max(map(len, prompts)), share_of(len(frame), part)
    frame, prompts = frame.iloc[share].reset_index(drop=True), prompts[share]
    questions, scored = scorer_inputs(frame, prompts)
    # As environments read them.
    columns = {{"messages": "prompt"}.get(key, key): values for key, values in scored.items()}
    with closing(Scorer(config.scorer, config.plugins)) as scorer:
        answers = decode_passes(
            folder, prompts, passes, config, max_prompt_length=max_prompt_length,
            first_prompt=share.start, longest_prompt=longest, on_progress=on_progress,
            columns=columns if config.runs_episodes else None,
        )  # fmt: skip
        return [
            judge_answers(scorer, tokenizer, decoded, questions, scored, params.n)
            for params, decoded in zip(passes, answers, strict=True)
        ]


def _joined(sets: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of all sets as one table; DataError where a set has none."""
    if not sets or any(rows.empty for rows in sets.values()):
        raise DataError("there are no problems to evaluate on; check data.test_size")
    frame = pd.concat(list(sets.values()), ignore_index=True)
    if len(sets) > 1 and "extra_info" in frame:  # no row lacks a column that another set has
        extra = [x if isinstance(x, Mapping) else {} for x in frame["extra_info"]]
        frame["extra_info"] = pd.Series(extra, dtype=object)
    return frame


def share_of(problems: int, part: tuple[int, int]) -> slice:
    """The consecutive problems of a part, (which, of how many), of near-equal sizes."""
    which, parts = part
    if parts > problems:
        raise ConfigError(
            f"evaluate.map_parts={parts} is more than the {problems} problems that there are to "
            "share; lower it"
        )
    return slice(which * problems // parts, (which + 1) * problems // parts)


def scorer_inputs(
    frame: pd.DataFrame, prompt_ids: Sequence[list[int]]
) -> tuple[list[str], dict[str, list[object]]]:
    """The texts of RL rows' last messages, and the columns that rewards get, as in RL."""
    table = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    columns = collate_prompts(table, prompt_ids).columns
    prompts = [list(answered_messages(prompt)) for prompt in columns["prompt"]]
    scored: dict[str, list[object]] = {"messages": list(prompts)}
    scored |= {key: list(values) for key, values in columns.items() if key != "prompt"}
    return [prompt[-1]["content"] for prompt in prompts], scored


def judge_answers(
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[Answer],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    n: int,
) -> list[Judged]:
    """Judge n completions, or episodes, of each of P prompts, in order; see `judge`.

    `columns` are those of `scorer_inputs`. A completion is judged with what its prompt has opened.
    """
    prompts = [prompt for prompt in prompts for _ in range(n)]
    repeated = {name: [v for v in values for _ in range(n)] for name, values in columns.items()}
    episodes = [answer.episode for answer in answers if answer.episode]
    if episodes:
        return judge_episodes(scorer, episodes, prompts, repeated)
    prompt_ids: Sequence[Any] = repeated["prompt_ids"]
    completions = [
        (turn_text(tokenizer, ids, answer.token_ids), len(answer.token_ids), answer.truncated)
        for ids, answer in zip(prompt_ids, answers, strict=True)
    ]
    return judge(scorer, completions, prompts, repeated)
