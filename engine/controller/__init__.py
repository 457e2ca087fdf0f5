"""The single controller: one program over many ranks, in this process or on Ray actors.

Read `groups` first: a role on all its ranks, called as one object. `launch` starts the processes
of a `placement`, `worker_host` is their side of a call; `async_rollout` is rollout that never waits
for the trainer.
"""
