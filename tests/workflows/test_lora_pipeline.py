"""`model.lora` reaches the warm start and RL, and all that follows sees ordinary models."""

from __future__ import annotations

from pathlib import Path

import torch
from flyte_runs import TriedAgain
from transformers import AutoModelForCausalLM

from engine.models import require_model_folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_both_stages_train_adapters_and_leave_plain_models(tried_again: TriedAgain) -> None:
    artifacts = tried_again.again.summary["artifacts"]
    warm, policy = (Path(artifacts[stage]) for stage in ("sft", "rl"))
    before = weights(tried_again.start)
    for folder, earlier in ((warm, before), (policy, weights(warm))):
        after = weights(folder)
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            assert torch.equal(tensor, earlier[name]) == ("_proj." not in name), name
        require_model_folder(folder / "adapter")
