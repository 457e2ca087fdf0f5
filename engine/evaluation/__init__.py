"""How good a model is, whether another one is better, and the page that shows it.

`metrics` → `rows` → `summary` → `report` (HTML, with `plots`).
Nothing here decodes tokens or knows a reward: completions and a scoring function come in.
"""
