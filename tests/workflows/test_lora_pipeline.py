"""`model.lora` reaches the warm start and RL, and all that follows sees ordinary models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from flyte_runs import STAGES, Place, settings
from transformers import AutoModelForCausalLM

from engine.models import require_model_folder

LORA = {
    "model": {"lora": {"rank": 4, "alpha": 8}},
    # The entropy's gradient is there whatever the rewards are.
    "rl": {"trainer": {"total_training_steps": 1}, "actor": {"entropy_coeff": 0.01}},
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_both_stages_train_adapters_and_leave_plain_models(
    place: Place, model_folder: Callable[..., Path]
) -> None:
    start = model_folder("llama")
    outcome = place.run("--model", str(start), "--config", settings(LORA))
    assert outcome.code == 0, outcome.text
    assert outcome.stages == list(STAGES)
    warm, policy = (Path(outcome.summary["artifacts"][stage]) for stage in ("sft", "rl"))
    before = weights(start)
    for folder, earlier in ((warm, before), (policy, weights(warm))):
        after = weights(folder)
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            assert torch.equal(tensor, earlier[name]) == ("_proj." not in name), name
        require_model_folder(folder / "adapter")
