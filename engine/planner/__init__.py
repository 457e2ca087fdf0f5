"""The planner chooses a run's layout on the machines that are there, with its cost and reason.

Read `layout_search` first. `memory` and `cost` price a layout in bytes and seconds by the `sizes`
of a model and a step, `resources` knows machines and devices, `explain` puts a plan into words.
All is arithmetic, but for one function that asks Ray (`resources.read_cluster`). What a
configuration leaves open, and how a plan becomes settings, is in `engine.trainers.auto_placement`.
"""
# ruff: noqa: F401  # what other rooms import

from engine.planner.explain import explain, explain_memory
from engine.planner.layout_search import PlacementPlan, fitted, search, search_apart
from engine.planner.resources import Cluster, Machine, read_cluster
from engine.planner.sizes import Candidate, FixedSettings, Samplers, Workload
