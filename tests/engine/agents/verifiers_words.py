"""A small environment package with `verifiers`' own interface, as its authors write them."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):
    """Tells how long each turn was, three times at most; "stop" ends it."""

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"] or ""
        if state["info"].get("broken"):
            raise vf.Error("the echo is broken")
        if "stop" in said:
            state["final_env_response"] = [{"role": "user", "content": "stopped"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{len(said)} characters"}]


class Rewriting(Echo):
    """Begins the conversation again in each turn."""

    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


async def digits(completion, state, **kwargs):
    turns = [m["content"] or "" for m in completion if m["role"] == "assistant"]
    return float(sum(c.isdigit() for turn in turns for c in turn))


def answered(completion, answer, **kwargs):
    return 1.0 if answer in (completion[-1]["content"] or "") else 0.0


def together(completions, **kwargs) -> list[float]:
    return [0.0] * len(completions)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def load_environment(kind: str = "echo", questions: int = 3) -> vf.Environment:
    rows = [
        {"question": f"{i}+1=", "answer": str(i + 1), "info": {"broken": i == 2}}
        for i in range(questions)
    ]
    dataset = Dataset.from_list(rows)
    if kind == "tools":
        rubric = vf.Rubric(funcs=[answered])
        return vf.ToolEnv(tools=[add], dataset=dataset, rubric=rubric, max_turns=4)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[together]))
    made = Rewriting if kind == "rewriting" else Echo
    rubric = vf.Rubric(funcs=[digits, answered], weights=[1.0, 0.5])
    return made(dataset=dataset, rubric=rubric, max_turns=3, system_prompt="Say numbers.")
