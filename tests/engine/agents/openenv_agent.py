"""An agent of its own Python: OpenEnv's client on one side, OpenAI's on the other.

PYTHON openenv_agent.py URL
"""

from __future__ import annotations

import json
import os
import sys

from openai import OpenAI
from openenv.core import GenericEnvClient


def main(url: str) -> None:
    with open(os.environ["HYBRIDFLYTE_ROW"]) as file:
        row = json.load(file)
    client, messages, reward = OpenAI(), list(row["prompt"]), 0.0
    with GenericEnvClient(base_url=url).sync() as env:
        seen = env.reset(seed=6)
        for _ in range(3):
            messages.append({"role": "user", "content": seen.observation["text"]})
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            said = answer.choices[0].message
            messages.append(said)
            seen = env.step({"message": said.content or "."})
            reward += seen.reward or 0.0
            if seen.done:
                break
    with open(os.environ["HYBRIDFLYTE_REWARD"], "w") as file:
        json.dump({"reward": reward, "left": seen.observation["left"]}, file)


if __name__ == "__main__":
    main(sys.argv[1])
