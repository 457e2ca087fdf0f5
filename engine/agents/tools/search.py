"""Retrieval over a local corpus by BM25 (Robertson and Zaragoza 2009, with k1 = 1.5, b = 0.75)."""

from __future__ import annotations

import heapq
import json
import math
import os
import re
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

from engine.agents.tools.registry import register_tool
from engine.errors import ConfigError

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75


@register_tool("search")
def search(query: str, *, corpus: str = "", top_k: int = 3) -> str:
    """Find the passages of a collection that fit a query best.

    Args:
        query: A few words of what is looked for.
    """
    found = open_corpus(corpus).best(query, top_k)
    return "\n\n".join(f"[{place}] {text}" for place, text in found) or "(nothing was found)"


class Bm25:
    """An index of N texts; scores fall with how common a word is and how long a text."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        words = [_WORD.findall(text.lower()) for text in texts]
        mean = sum(map(len, words)) / max(1, len(words)) or 1.0
        for place, found in enumerate(words):
            length = 1 - _B + _B * len(found) / mean
            for word, count in Counter(found).items():
                self._postings[word].append((place, count * (_K1 + 1) / (count + _K1 * length)))

    def best(self, query: str, count: int) -> list[tuple[int, str]]:
        """The `count` texts that fit best, with their places; fewer where fewer share a word."""
        scores: Counter[int] = Counter()
        for word in set(_WORD.findall(query.lower())):
            postings = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.texts) - len(postings) + 0.5) / (len(postings) + 0.5))
            for place, weight in postings:
                scores[place] += rarity * weight  # type: ignore[assignment]
        best = heapq.nsmallest(count, scores.items(), key=lambda one: (-one[1], one[0]))
        return [(place, self.texts[place]) for place, _ in best]


def open_corpus(path: str) -> Bm25:
    """The index of a corpus: JSON lines with `text` (and `title`), or passages of plain text.

    Raises ConfigError for a file that can't be read. It is indexed once a process.
    """
    if not path:
        raise ConfigError("tool 'search' needs options.corpus, a .jsonl or .txt file")
    try:
        return _indexed(path, os.stat(path).st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"tool 'search': corpus {path!r} can't be read ({type(error).__name__}: {error}); give "
            'JSON lines with "text", or text with empty lines between passages'
        ) from error


@lru_cache(maxsize=4)
def _indexed(path: str, changed: int) -> Bm25:
    text = Path(path).read_text(encoding="utf-8")
    if not path.endswith((".jsonl", ".json")):
        return Bm25([one.strip() for one in re.split(r"\n\s*\n", text) if one.strip()])
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return Bm25(
        [f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"]) for row in rows]
    )
