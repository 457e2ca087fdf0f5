"""An agent of `harbor`, as its users write them, with the plain `openai` client."""

from __future__ import annotations

import shlex

import openai
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

__all__ = ["WritingAgent"]


class WritingAgent(BaseAgent):
    """Asks twice, and writes what the policy said last into the task's file."""

    @staticmethod
    def name() -> str:
        return "writing"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(
        self, instruction: str, environment: BaseEnvironment, context: AgentContext
    ) -> None:
        messages = [{"role": "user", "content": instruction}]
        async with openai.AsyncOpenAI() as client:
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=8
                )
                text = (answer.choices[0].message.content or "").replace("\0", "")
                command = f"printf %s {shlex.quote(text)} > answer.txt; pwd; wc -c answer.txt"
                done = await environment.exec(command, timeout_sec=20)
                shown = f"{done.stdout}{done.stderr}"
                messages += [answer.choices[0].message, {"role": "user", "content": shown}]
