"""Episodes as rows of a batch: what was sampled is learned from, all of it is attended to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.agents.episode import Episode
from engine.agents.protocol import Action
from engine.agents.transcript import TrainingSequence
from engine.batch import Batch
from engine.data.collate import collate_completions, pad


def collate_episodes(
    prompts: Batch,
    episodes: Sequence[Episode],
    *,
    pad_token_id: int,
    version: int = 0,
    branches: bool = False,
) -> Batch:
    """The training sequences of `episodes`, in their order, in the layout of `engine.batch`.

    `prompts` has the rows that they began from. `response_mask` is 0 on what was not sampled. To
    the fields of completions come `environment_rewards` and `token_versions` `[B, R]`, `truncated`,
    `policy_version` (of the oldest token; `version` without any) and `episode_failed` `[B]`. With
    `branches` an episode may have several rows, one after the other, which `episode_ids`,
    `first_turn` and `continues` `[B]` tell.
    """
    each = 1 + max((episode.index for episode in episodes), default=0)
    pairs: list[tuple[int, Episode, TrainingSequence]] = []
    for episode in episodes:
        assert episode.transcript is not None, "the episode was played"
        number = episode.key * each + episode.index
        pairs += [(number, episode, one) for one in episode.transcript.finished()]
    own = [sequence for _, _, sequence in pairs]
    index = [episode.row for _, episode, _ in pairs]
    begun = Batch(
        {"group_ids": prompts["group_ids"][index]},
        {name: values[index] for name, values in prompts.columns.items() if name != "prompt_ids"}
        | {"prompt_ids": [sequence.prompt_ids for sequence in own]},
    )
    batch = collate_completions(
        begun,
        range(len(own)),
        [sequence.token_ids for sequence in own],
        [sequence.log_probs for sequence in own],
        pad_token_id=pad_token_id,
    )
    versions = pad([sequence.versions for sequence in own], 0, side="right")
    fields: dict[str, torch.Tensor] = {
        "response_mask": pad([[float(s) for s in one.sampled] for one in own], 0.0, side="right"),
        "environment_rewards": pad([one.rewards for one in own], 0.0, side="right"),
        "token_versions": versions,
        "policy_version": torch.tensor([min(one.versions, default=version) for one in own]),
        "truncated": torch.tensor([episode.truncated for _, episode, _ in pairs]),
        "episode_failed": torch.tensor([episode.dropped for _, episode, _ in pairs]),
    }
    if branches:
        numbers = torch.tensor([number for number, _, _ in pairs])
        fields |= {
            "episode_ids": numbers,
            "first_turn": torch.tensor([one.first_turn for one in own]),
            "continues": torch.cat((numbers[:-1] == numbers[1:], torch.zeros(1).bool())),
        }
    columns: dict[str, list[object]] = {
        "episode_end": [episode.end for _, episode, _ in pairs],
        "episode_error": [episode.error for _, episode, _ in pairs],
        "episode_info": [episode.info for _, episode, _ in pairs],
        "episode_turns": [episode.transcript.turns for _, episode, _ in pairs],  # type: ignore[union-attr]
        "episode_turn_spans": [turn_spans(episode, one) for _, episode, one in pairs],
        "episode_reward": [sum(episode.turn_rewards) for _, episode, _ in pairs],
        "environment_seconds": [episode.environment_seconds for _, episode, _ in pairs],
    }
    return batch | Batch(fields, columns)


def turn_spans(episode: Episode, sequence: TrainingSequence) -> list[dict[str, object]]:
    """Where each turn of a row lies among its response tokens, and what its calls were read as.

    E.g. [{"start": 0, "stop": 9, "calls": [("add", {"a": 1})], "malformed": []}].
    """
    actions = episode.actions[sequence.first_turn :]
    unread = [Action("")] * (len(sequence.turns) - len(actions))  # where the parser failed
    return [
        {
            "start": start,
            "stop": stop,
            "calls": [(call.name, dict(call.arguments)) for call in action.tool_calls],
            "malformed": list(action.malformed),
        }
        for (start, stop), action in zip(sequence.turns, [*actions, *unread], strict=False)
    ]
