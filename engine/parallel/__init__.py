"""One model on many ranks: layouts, their application to a model, and moving between them.

Read `layout` first (the axes), then `process_groups` (a rank's place in them). `fsdp`,
`tensor_parallel`, `sequence_parallel` and `pipeline_parallel` apply an axis to a model. `reshard`
plans how rollout ranks get the weights of training ranks, and `exchange` runs the plan.
"""
