"""An agent that is a program: it knows OpenAI's API and two files, and nothing of this project.

python agent_program.py [leave | silent | fail]
"""

import json
import os
import sys
import urllib.request


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages, "max_tokens": 5}).encode(),
        {
            "content-type": "application/json",
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def main(how="leave"):
    with open(os.environ["HYBRIDFLYTE_ROW"]) as file:
        row = json.load(file)
    said = ask(row["prompt"])
    said = ask([*row["prompt"], said, {"role": "user", "content": "Sure?"}])
    if how == "fail":
        sys.exit("no luck today")
    if how == "leave":
        with open(os.environ["HYBRIDFLYTE_REWARD"], "w") as file:
            json.dump({"reward": 0.5, "length": len(said["content"] or "")}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
