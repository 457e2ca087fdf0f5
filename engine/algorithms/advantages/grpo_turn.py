"""GRPO with credit by turn: an episode relative to its group, and each turn to the group's."""

import torch
from torch import Tensor

from engine.algorithms.advantages._base import (
    AdvantageInputs,
    AdvantageOutputs,
    register_advantage,
)
from engine.algorithms.advantages.grpo import grpo_scores
from engine.algorithms.masked import Groups, safe_divide


@register_advantage("grpo_turn", min_group_size=2)
def grpo_turn(
    inputs: AdvantageInputs,
    *,
    gamma: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    turn_weight: float = 1.0,
) -> AdvantageOutputs:
    """A_k = A^E + ω·A^T_k on the tokens of turn k.

    A^E is GRPO's advantage of the episode's whole reward. A^T_k compares G_k = Σ_{j≥k} γ^{j−k} r_j,
    what turn k and later ones earned, with G_k of the group's other episodes that have a turn k:
    (G_k − μ)/(σ + ε), 0 where there is no other. r_j are the sums of a turn's rewards. Where an
    episode earns at its end alone and γ=1, A^T repeats A^E among episodes that are as long.
    Source: the two levels are GiGPO's, arXiv 2505.10978, eq. 8; rewards by turn MT-GRPO's, arXiv
    2505.11821. Both group by what is comparable: here, the number of the turn.
    """
    turns = inputs.turns
    rewards = turns.sum(inputs.token_level_rewards)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(rewards.shape[0])
    for k in reversed(range(rewards.shape[1])):
        running = rewards[:, k] + gamma * running
        returns[:, k] = running
    by_std = norm_adv_by_std_in_grpo
    episodes = grpo_scores(inputs.scores, inputs.groups, by_std, epsilon)
    group_of = torch.zeros(len(turns.present), dtype=torch.long, device=rewards.device)
    group_of[turns.episode] = inputs.group_ids
    relative = torch.stack(
        [
            _relative(returns[:, k], group_of, turns.present[:, k], by_std, epsilon)
            for k in range(rewards.shape[1])
        ],
        dim=1,
    )
    tokens = turns.to_tokens(turn_weight * relative)
    tokens = tokens + turns.mask * episodes[:, None]
    return AdvantageOutputs(tokens, turns.to_tokens(returns))


def _relative(x: Tensor, group_ids: Tensor, rows: Tensor, by_std: bool, epsilon: float) -> Tensor:
    """`x` `[E]` of the episodes `rows` relative to their groups; 0 for one that is alone."""
    groups = Groups.of(group_ids, rows)
    centered = x - groups.mean(x)[groups.index]
    if by_std:
        centered = safe_divide(centered, groups.std(x)[groups.index] + epsilon)
    compared = rows & (groups.size > 1)[groups.index]
    return torch.where(compared, centered, torch.zeros_like(x))
