"""Completions judged by the run's scorer: from texts and the rows they answer to `Judged`.

Episodes, too: by what their environments gave and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.agents.played import PlayedEpisode
from engine.evaluation.rows import Judged
from engine.rewards import Scorer, Scores
from engine.rewards.environment import NAME as ENVIRONMENT

AT_ONCE = 256  # completions in one call of the scorer, which has a deadline


def judge(
    scorer: Scorer,
    texts: Sequence[str],
    tokens: Sequence[int],
    truncated: Sequence[bool],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[Judged]:
    """Judge B completions to B prompts (the texts of their last messages), with B of each column.

    One that can't be scored is wrong, and marked; with `on_error: fail` RewardError is raised.
    """
    judged: list[Judged] = []
    on_error = "fail" if scorer.config.on_error == "fail" else "zero"
    for start in range(0, len(texts), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        some = {name: values[part] for name, values in columns.items()}
        scores = scorer.score(prompts[part], texts[part], some, on_error)  # type: ignore[arg-type]
        judged += _judged(scorer, scores, texts[part], tokens[part], truncated[part], some)
    return judged


def episode_columns(scored: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
    """The columns of data set rows, as environments read them, from those that rewards get."""
    return {name: values for name, values in scored.items() if name != "messages"} | {
        "prompt": scored["messages"]
    }


def judge_episodes(
    scorer: Scorer,
    episodes: Sequence[PlayedEpisode],
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[object]],
) -> list[Judged]:
    """Judge B episodes of B prompts (the texts of their last messages), as RL rewards them.

    With `reward.name=environment` an episode's `info` says whether it succeeded, and where it
    doesn't, a return of 1 or more. Another reward judges the last turn, and what the environment
    gave is added to its score. An episode whose environment failed is wrong, and marked.
    """
    own = scorer.config.name == ENVIRONMENT
    judged = judge(
        scorer,
        [one.answer for one in episodes],
        [one.tokens for one in episodes],
        [one.truncated for one in episodes],
        prompts,
        {**columns, "episode_reward": [one.reward for one in episodes]},
    )
    found = []
    for one, episode in zip(judged, episodes, strict=True):
        right = episode.success if own and episode.success is not None else one.correct
        found.append(
            replace(
                one,
                text=episode.text,
                correct=right and not episode.failed,
                score=one.score if own else one.score + episode.reward,
                answer=one.answer if one.answer is not None else episode.answer,
                failed=one.failed or episode.failed,
                episode=episode,
            )
        )
    return found


def _judged(
    scorer: Scorer,
    scores: Scores,
    texts: Sequence[str],
    tokens: Sequence[int],
    truncated: Sequence[bool],
    columns: Mapping[str, Sequence[object]],
) -> list[Judged]:
    sources = columns.get("data_source", [""] * len(texts))
    answers, readable = scorer.answers(texts, sources)
    right, totals = scorer.correct(scores, sources), scorer.totals(scores)
    kept = _kept(scorer, scores, texts, sources)
    return [
        Judged(
            text=text,
            tokens=tokens[i],
            truncated=truncated[i],
            correct=right[i],
            score=totals[i],
            answer=answers[i],
            vote=answers[i] if readable else text.strip(),
            well_formed=kept[i],
            failed=i in scores.failures,
        )
        for i, text in enumerate(texts)
    ]


def _kept(
    scorer: Scorer, scores: Scores, texts: Sequence[str], sources: Sequence[object]
) -> list[bool]:
    """Which keep the format: by a component `format`, or as the rewards' rules say."""
    names = scores.components or ()
    if "format" in names:
        return [row[names.index("format")] >= 1 for row in scores.rows]
    return scorer.well_formed(texts, sources) or [True] * len(texts)
