"""The graph of artifacts: what was made from what, whether it is as recorded, and what differs.

Read `graph` first: it finds the manifests of stores and walks them. `lookup` is the entry point:
its `review` goes from what a person names to the graph around it. `audit` checks a graph, `compare`
compares two of its nodes, `page` shows them as HTML. `__main__` is the command, and shows them in a
terminal.
"""
