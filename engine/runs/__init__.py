"""Runs beside each other: `sources` reads what they left, `comparison` compares it."""
