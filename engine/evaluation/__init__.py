"""Measures a model, compares it with another, and shows both on a page. Read `scoring` first."""
