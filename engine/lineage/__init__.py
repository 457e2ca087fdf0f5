"""The graph of artifacts: what was made from what, whether it is as recorded, and what differs.

`index` finds the manifests of a store, `graph` walks them, `origin` says what checkpoints are made
from, `registry` adds MLflow's model versions, and `review` is the entry point: from what a person
names to its graph. `audit` checks a graph, `compare` compares two of its nodes. `terminal` and
`page` show them, and `__main__` is the command.
"""
