"""Lineage is the graph of artifacts: their parents, whether they are as recorded, and diffs.

Read `graph` first: it finds the manifests of stores and walks them. `lookup` is the entry point:
its `review` goes from what a person names to the graph around it. `audit` checks a graph, `compare`
compares two of its nodes, `page` shows them as HTML, `__main__` in a terminal.
"""
