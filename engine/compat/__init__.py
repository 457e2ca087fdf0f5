"""Published forms of this engine's classes: adapters onto `trainers`, `runtime` and `controller`.

Read `rl_trainer` first: `RLTrainer(actor_model=…)`, `DataPipeline` and `DeviceMesh`; then
`hf_trainer`, which has `Trainer.from_hf_config`. `docs/migration.md` says for each snippet what it
does here. What these adapters lack, the classes below them have.
"""
