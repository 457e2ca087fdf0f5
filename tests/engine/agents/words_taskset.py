"""A taskset of `verifiers` 0.4, as its authors write them."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["WordsTaskset"]


class WordsData(vf.TaskData):
    answer: str = ""


class WordsTask(vf.Task[WordsData]):
    @vf.reward(weight=1.0)
    async def digits(self, trace: vf.Trace) -> float:
        text = trace.last_reply or ""
        return sum(c.isdigit() for c in text) / max(1, len(text))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class WordsConfig(vf.TasksetConfig):
    pass


class WordsTaskset(vf.Taskset[WordsTask, WordsConfig]):
    def load(self) -> list[WordsTask]:
        return [
            WordsTask(WordsData(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task)
            for i in range(4)
        ]
