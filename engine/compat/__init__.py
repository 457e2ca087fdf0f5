"""Published forms of this engine's classes: adapters onto `trainers`, `runtime` and `controller`.

Read `rl_trainer` first: `RLTrainer(actor_model=…)`, `DataPipeline` and `DeviceMesh`; then
`hf_trainer`: `Trainer.from_hf_config`. `docs/migration.md` says what each snippet does here.
"""
