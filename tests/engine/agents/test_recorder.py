"""What agents ask becomes ids: what was sampled stays, and rewritten histories branch."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from engine.agents.call_parsers import parsed_action, resolve_call_parser
from engine.agents.endpoint import assistant_message, until_stop
from engine.agents.environment_protocol import Action
from engine.agents.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    History,
    collate_episodes,
    load_episode,
    plain_action,
)
from engine.agents.recorder import (
    EpisodeRecorder,
    LimitReached,
    RecordedPrompt,
    RecordedTurn,
    Replays,
    plain_message,
)
from engine.batch import Batch
from engine.data.collate import collate_prompts
from engine.data.templates import stop_token_ids
from engine.data.tokenizer import load_tokenizer
from engine.errors import DataError
from engine.rollout.stream import PartialCompletion, PartialRequest

END = 2  # SmolLM2's <|im_end|>
ASK = {"role": "user", "content": "What is 17 * 23?"}
TOOL = {
    "type": "function",
    "function": {"name": "calc", "description": "", "parameters": {"type": "object"}},
}
CALL = '<tool_call>{"name": "calc", "arguments": {"b": [1, "é"], "a": 2}}</tool_call>'
LIMITS = EpisodeLimits(max_response_length=4000, max_model_len=8000)


@pytest.fixture(scope="module")
def smollm2(smollm2_tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2_tokenizer_folder)


class Client:
    """Asks a recorder, and answers as a policy that writes letter by letter."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str = chat_templates.QWEN25,
        history: History = "append",
        limits: EpisodeLimits = LIMITS,
    ) -> None:
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.chat_template = template
        read = partial(parsed_action, resolve_call_parser("hermes"))
        stops = stop_token_ids(self.tokenizer)
        self.episode_tokenizer = EpisodeTokenizer(self.tokenizer, stops, read, history)
        self.recorder = EpisodeRecorder(self.episode_tokenizer, limits)
        self.sampled: list[tuple[list[int], list[int]]] = []  # prompt and turn

    def letters(self, text: str, ended: bool = True) -> list[int]:
        """Ids of a text that the tokenizer would make others of."""
        ids = [i for c in text for i in self.tokenizer.encode(c, add_special_tokens=False)]
        return [*ids, END] if ended else ids

    def add(self, prompt: RecordedPrompt, ids: list[int], tools: bool = False) -> RecordedTurn:
        number = len(self.sampled)
        part = PartialCompletion(0, ids, [-0.25 * (number + 1)] * len(ids), [number] * len(ids))
        self.sampled.append((prompt.ids, ids))
        action = self.episode_tokenizer.action(prompt.ids, ids, tools=[TOOL] if tools else ())
        self.said = assistant_message(action, number) if prompt.messages else None
        return self.recorder.add(prompt, part, action, self.said, key=number)

    def turn(self, messages: Sequence[Any], text: str, tools: Sequence[Any] = ()) -> dict[str, Any]:
        """A turn that says `text`; the message that the client is given."""
        self.add(self.recorder.chat(messages, tools), self.letters(text), bool(tools))
        assert self.said is not None
        return self.said

    def episode(self) -> Episode:
        made = Episode(0, 0, 0, self.episode_tokenizer, LIMITS, [1])
        self.recorder.write_to(made)
        return made

    def text(self, ids: Sequence[int]) -> str:
        return self.episode_tokenizer.spelling(ids)


def rows(episode: Episode) -> list[Any]:
    assert episode.transcript is not None
    return episode.transcript.sequences


def test_a_conversation_that_goes_on_keeps_the_ids_that_were_sampled(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    client = Client(smollm2)
    chat: list[Any] = [ASK, client.turn([ASK], "17 times 23 is 391")]
    chat = [*chat, {"role": "user", "content": "Sure?"}]
    last = client.turn(chat, "yes")
    assert last == {"role": "assistant", "content": "yes"}
    [row] = rows(client.episode())
    first, second = (ids for _, ids in client.sampled)
    assert row.token_ids[: len(first)] == first
    assert row.token_ids[-len(second) :] == second
    between = row.token_ids[len(first) : -len(second)]
    assert client.text(between) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert [t for t, own in zip(row.token_ids, row.sampled, strict=True) if own] == first + second
    assert set(row.log_probs) == {0.0, -0.25, -0.5}
    assert row.turns == [(0, len(first)), (len(row.token_ids) - len(second), len(row.token_ids))]
    assert smollm2.encode("17 times 23 is 391", add_special_tokens=False) != first[:-1]
    assert [m["content"] for m in client.episode().messages] == [
        *("What is 17 * 23?", "17 times 23 is 391", "Sure?", "yes")
    ]


SAID = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c00000000", "type": "function",
     "function": {"name": "calc", "arguments": '{"b": [1, "é"], "a": 2}'}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ({}, True),
        ({"content": ""}, True),
        ({"content": []}, True),
        ({"refusal": None, "annotations": [], "audio": None, "function_call": None}, True),
        ({"name": None, "reasoning_content": None}, True),
        ({"tool_calls": [{**SAID["tool_calls"][0], "id": "mine", "index": 0}]}, True),  # type: ignore[index]
        ({"tool_calls": [{"type": "function", "id": "x", "function": {
            "name": "calc", "arguments": json.dumps({"a": 2, "b": [1, "é"]}, indent=1)}}]}, True),
        ({"tool_calls": [{"type": "function", "id": "x", "function": {
            "name": "calc", "arguments": {"a": 2, "b": [1, "é"]}}}]}, True),
        ({"tool_calls": [{"type": "function", "id": "x", "function": {
            "name": "calc", "arguments": {"a": 3, "b": [1, "é"]}}}]}, False),
        ({"content": "I call."}, False),
        ({"tool_calls": [], "content": "summary"}, False),
        ({"reasoning_content": "hm"}, False),
    ],
)  # fmt: skip
def test_clients_write_a_turn_in_many_ways(
    smollm2: PreTrainedTokenizerBase, said: dict[str, Any], same: bool
) -> None:
    client = Client(smollm2)
    first = client.turn([ASK], CALL, [TOOL])
    assert first["content"] is None
    assert first["tool_calls"] == SAID["tool_calls"]
    result = {"role": "tool", "tool_call_id": "c00000000", "content": "391"}
    prompt = client.recorder.chat([ASK, first | said, result], [TOOL])
    asked, sampled = client.sampled[0]
    assert (prompt.ids[: len(asked) + len(sampled)] == asked + sampled) == same
    assert prompt.extends == same
    client.add(prompt, client.letters("391"), True)
    assert len(rows(client.episode())) == (1 if same else 2)


def test_other_tools_are_another_prompt(smollm2: PreTrainedTokenizerBase) -> None:
    client = Client(smollm2)
    first = client.turn([ASK], "hm", [TOOL])
    for tools in ([], [TOOL, TOOL]):
        assert client.recorder.chat([ASK, first, ASK], tools).parent is None
    assert client.recorder.chat([ASK, first, ASK], [TOOL]).parent is not None


def test_thoughts_stand_apart_and_dropping_them_branches(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    client = Client(smollm2, chat_templates.QWEN3)
    first = client.turn([ASK], "<think>\n391, I guess\n</think>\n\n391")
    assert first == {"role": "assistant", "content": "391", "reasoning_content": "391, I guess"}
    kept = client.recorder.chat([ASK, first, ASK])
    assert kept.extends
    assert "I guess" in client.text(kept.ids)
    dropped = client.recorder.chat([ASK, {"role": "assistant", "content": "391"}, ASK])
    assert dropped.parent is None
    assert "I guess" not in client.text(dropped.ids)
    branching = Client(smollm2, chat_templates.QWEN3, "branches")
    first = branching.turn([ASK], "<think>\n391, I guess\n</think>\n\n391")
    assert branching.recorder.chat([ASK, first, ASK]).ids == dropped.ids


def r1() -> Client:
    """A client of a model whose template opens the thought."""
    tokenizer = chat_templates.family_tokenizer("r1-distill")
    return Client(tokenizer, str(tokenizer.chat_template))


@pytest.mark.parametrize(
    ("text", "tools", "said"),
    [
        ("17 * 20\n</think>\n\n391", False, {"content": "391", "reasoning_content": "17 * 20"}),
        ("17 * 20, or", False, {"content": "", "reasoning_content": "17 * 20, or"}),
        ("\n</think>\n\n391", False, {"content": "391"}),
        (f"I could {CALL}", True, {"content": "", "reasoning_content": f"I could {CALL}"}),
        (f"Call!</think>{CALL}", True, {"content": None, "reasoning_content": "Call!"}),
    ],
)
def test_a_thought_that_the_prompt_has_opened_is_a_thought(
    text: str, tools: bool, said: dict[str, Any]
) -> None:
    client = r1()
    shown = [TOOL] if tools else []
    prompt = client.recorder.chat([ASK], shown)
    assert client.text(prompt.ids).endswith("<think>\n")
    end = list(client.episode_tokenizer.stop_ids)
    turn = client.add(prompt, [*client.letters(text, ended=False), *end], tools)
    assert turn.action.text == f"<think>\n{text}"
    assert client.said is not None
    called = client.said.pop("tool_calls", [])
    assert client.said == {"role": "assistant", **said}
    assert len(called) == len(turn.action.tool_calls) == (said["content"] is None)
    more = client.recorder.chat([ASK, client.said | {"tool_calls": called}, ASK], shown)
    assert more.extends
    assert more.ids[: turn.length] == turn.ids
    assert client.text(more.ids).endswith("<think>\n")


def test_texts_go_on_from_a_thought_that_they_have_opened() -> None:
    client = r1()
    prompt = client.recorder.completion("<｜User｜>17 * 23?<｜Assistant｜><think>\n")
    turn = client.add(prompt, client.letters("Hm", ended=False))
    assert turn.action.text == "<think>\nHm"
    more = client.recorder.completion(f"{prompt.text}Hm, 391")
    assert more.extends
    assert more.ids[: turn.length] == turn.ids


def test_a_text_that_a_client_stops_at_is_not_said() -> None:
    client = r1()
    ids = client.letters("Hm</think>one STOP", ended=False)
    prompt = client.recorder.chat([ASK]).ids
    action = client.episode_tokenizer.action(prompt, ids, unread=5)
    assert (action.text, action.content) == ("<think>\nHm</think>one", "<think>\nHm</think>one")
    assert action.token_ids == tuple(ids)


def test_calls_are_read_with_the_tools_of_their_request(smollm2: PreTrainedTokenizerBase) -> None:
    asked: list[Any] = []

    def reader_of(tools: Sequence[Any]) -> Any:
        asked.append(tools)
        return partial(parsed_action, resolve_call_parser("hermes"))

    reader = EpisodeTokenizer(smollm2, (END,), plain_action, reader_of=reader_of)
    ids = smollm2.encode(CALL, add_special_tokens=False)
    calls = [len(reader.action([], ids, tools=tools).tool_calls) for tools in ((), None, [TOOL])]
    assert (calls, asked) == ([0, 0, 1], [[TOOL]])


def test_choices_and_retries_are_branches_of_one_prompt(smollm2: PreTrainedTokenizerBase) -> None:
    client = Client(smollm2)
    prompt = client.recorder.chat([ASK])
    answers = []
    for text in ("one", "two"):  # n=2
        client.add(prompt, client.letters(text))
        answers.append(client.said)
    client.turn([ASK, answers[1], {"role": "user", "content": "go on"}], "three")
    client.turn([ASK, answers[1], {"role": "user", "content": "again"}], "four")
    first, second, retried = rows(client.episode())
    assert [len(row.turns) for row in (first, second, retried)] == [1, 2, 1]
    assert [row.first_turn for row in (first, second, retried)] == [0, 1, 3]
    assert first.prompt_ids == second.prompt_ids == prompt.ids
    two = len(client.letters("two"))
    assert retried.prompt_ids[: len(prompt.ids) + two] == second.ids[: len(prompt.ids) + two]
    assert [action.text for action in client.episode().actions] == ["one", "two", "three", "four"]


def test_branches_are_rows_of_one_episode(smollm2: PreTrainedTokenizerBase) -> None:
    client = Client(smollm2)
    client.turn([ASK], "one")
    client.turn([{"role": "user", "content": "A summary"}], "two")
    episode = client.episode()
    episode.end = "done"
    assert episode.transcript is not None
    episode.transcript.add_reward(2.0)
    prompts = collate_prompts([{"prompt": [ASK]}], [[1]])
    batch = collate_episodes(prompts, [episode], pad_token_id=0, branches=True)
    assert isinstance(batch, Batch)
    assert batch["episode_ids"].tolist() == [0, 0]
    assert batch["continues"].tolist() == [True, False]
    assert batch["environment_rewards"].sum(1).tolist() == [0.0, 2.0]
    assert batch["response_mask"].sum(1).tolist() == [len(ids) for _, ids in client.sampled]


def test_the_last_turn_has_the_reward_whatever_row_it_is_in(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    client = Client(smollm2)
    first = client.turn([ASK], "one")
    client.turn([{"role": "user", "content": "an aside"}], "two")
    client.turn([ASK, first, ASK], "three")
    episode = client.episode()
    assert [len(row.turns) for row in rows(episode)] == [1, 2]
    assert [action.text for action in episode.actions] == ["two", "one", "three"]
    assert [row.first_turn for row in rows(episode)] == [0, 1]


@pytest.mark.parametrize(
    ("rest", "row_count"),
    [
        ("<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n", 1),
        (" and so on", 2),  # the policy had ended there, and the text goes on
    ],
)
def test_texts_go_on_from_what_was_sampled(
    smollm2: PreTrainedTokenizerBase, rest: str, row_count: int
) -> None:
    client = Client(smollm2)
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    first = client.letters("seventeen")
    client.add(client.recorder.completion(start), first)
    prompt = client.recorder.completion(start + "seventeen" + rest)
    asked = client.sampled[0][0]
    assert prompt.ids[: len(asked) + len(first) - 1] == asked + first[:-1]
    assert client.text(prompt.ids) == start + "seventeen" + rest
    client.add(prompt, client.letters("x"))
    assert len(rows(client.episode())) == row_count
    again = client.recorder.completion([*prompt.ids, *client.letters("x"), 40])
    assert again.extends
    assert client.recorder.completion("other").parent is None


def test_a_stop_text_ends_a_turn_at_the_token_that_completes_it(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    client = Client(smollm2)
    ids = client.letters("one STOP two\n\nthree")
    part = PartialCompletion(0, ids, [float(-i) for i in range(len(ids))], [3] * len(ids))
    cut, text = until_stop(client.episode_tokenizer.text, part, ["\n\n", "STOP"])
    assert text == "one "
    assert client.text(cut.token_ids) == "one STOP"
    assert len(cut.token_ids) == len(cut.log_probs) == len(cut.token_versions) == 8
    assert until_stop(client.episode_tokenizer.text, part, ["four"]) == (
        part,
        "one STOP two\n\nthree",
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "no role"}, "is no message"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of type 'text'"),
        ({"role": "user", "content": 5}, "content of a message of the role 'user' is 5"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "'reasoning_content'"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "the field 'audio'"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "is no call of a tool"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments of a tool's call",
        ),
    ],
)
def test_what_can_t_be_shown_is_refused_by_name(message: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^messages.3: .*{said}"):
        plain_message(message, 3)


def test_clients_tools_are_functions(smollm2: PreTrainedTokenizerBase) -> None:
    client = Client(smollm2)
    with pytest.raises(DataError, match=r"^tools has {'type': 'web_search'}; give JSON schemas"):
        client.recorder.chat([ASK], [{"type": "web_search"}])
    assert client.recorder.chat([ASK], [TOOL["function"]]).tools == [TOOL]


def test_limits_are_said_before_a_turn_is_sampled(smollm2: PreTrainedTokenizerBase) -> None:
    limits = EpisodeLimits(
        max_response_length=60, max_model_len=90, max_turn_length=20, max_turns=2
    )
    client = Client(smollm2, limits=limits)
    prompt = client.recorder.chat([ASK])
    assert client.recorder.room(prompt) == 20
    with pytest.raises(LimitReached, match="max_assistant_turns") as reached:
        client.recorder.room(prompt, 3)
    assert reached.value.end == "turns"
    first = client.turn([ASK], "abcdefgh")
    more = client.recorder.chat([ASK, first, {"role": "user", "content": "x " * 8}])
    observed = len(more.ids) - len(prompt.ids)
    assert client.recorder.room(more) == min(20, 60 - observed, 90 - len(more.ids))
    with pytest.raises(LimitReached, match="leave no room") as reached:
        client.recorder.room(client.recorder.chat([{"role": "user", "content": "x " * 99}]))
    assert reached.value.end == "tokens"
    with pytest.raises(DataError, match="must end with one that the policy answers"):
        client.recorder.chat([ASK, first])


STEP = st.tuples(
    st.sampled_from(["go on", "again", "rewrite", "drop", "choices", "begin"]),
    st.integers(0, 5),
    st.text("ab <|>é", min_size=1, max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, min_size=1, max_size=9))
def test_every_sampled_token_is_in_one_row_after_the_ids_it_was_sampled_after(
    smollm2: PreTrainedTokenizerBase, steps: list[tuple[str, int, str]]
) -> None:
    client = Client(smollm2)
    chats: list[list[Any]] = [[ASK]]  # that ended in a turn, and the first
    for kind, which, text in steps:
        chat = chats[which % len(chats)]
        ask = {"role": "user", "content": text}
        if kind == "begin" or len(chat) == 1:
            chat = [{"role": "user", "content": f"{text}{which}"}]
        elif kind == "rewrite":
            chat = [*chat[:-1], {"role": "assistant", "content": "in short"}, ask]
        elif kind == "drop":
            chat = [*chat[:1], ask]
        else:
            before = client.recorder.chat([*chat, ask])
            assert before.parent is not None, "what was sampled is encoded again"
            chat = [*chat, ask]
        prompt = client.recorder.chat(chat)
        for choice in range(2 if kind == "choices" else 1):
            client.add(prompt, client.letters(text + "x" * choice, ended=which % 2 == 0))
            chats.append([*chat, client.said])
    episode = client.episode()
    kept = [
        (
            row.prompt_ids + row.token_ids[:start],
            row.token_ids[start:stop],
            set(row.sampled[start:stop]),
        )
        for row in rows(episode)
        for start, stop in row.turns
    ]
    assert sorted((p, t) for p, t, _ in kept) == sorted(client.sampled)
    assert all(all(own) for *_, own in kept)
    assert sum(sum(row.sampled) for row in rows(episode)) == sum(len(t) for _, t in client.sampled)
    assert all(row.sampled[-1] for row in rows(episode))
    assert rows(episode)[-1].turns[-1][1] == len(rows(episode)[-1].token_ids)
    assert len(episode.actions) == len(client.sampled)
    assert rows(episode)[-1].ids[-len(client.sampled[-1][1]) :] == client.sampled[-1][1]
    replays = Replays(episode.transcript)
    for asked, turn in client.sampled:
        part, whole = replays.take(asked)
        assert whole
        assert part is not None
        assert part.token_ids in [t for p, t in client.sampled if p == asked]
        assert len(part.log_probs) == len(part.token_ids)
        del turn
    assert replays.take(client.sampled[0][0]) == (None, False)


def test_an_interrupted_episode_is_replayed_from_its_checkpoint(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    client = Client(smollm2)
    first = client.turn([ASK], "one")
    prompt = client.recorder.chat([ASK, first, ASK])
    begun = PartialCompletion(0, client.letters("tw", ended=False), [-1.0, -2.0], [4, 5])
    under_way = PartialRequest("key", prompt.ids, [begun])
    tree = client.recorder.saved(client.episode(), under_way)
    assert tree is not None
    episode = Episode(0, 0, 0, client.episode_tokenizer, LIMITS, [1])
    turn = load_episode(episode, tree)
    assert turn is not None
    replays = Replays(episode.transcript, turn.tokens)
    whole, is_whole = replays.take(client.sampled[0][0])
    assert whole is not None
    assert (whole.token_ids, is_whole) == (client.sampled[0][1], True)
    rest, is_whole = replays.take(prompt.ids)
    assert (rest, is_whole) == (begun, False)
    assert client.recorder.saved(client.episode(), None) is not None
    assert EpisodeRecorder(client.episode_tokenizer, LIMITS).saved(episode, None) is None


def test_calls_that_can_t_be_read_stay_text() -> None:
    read = partial(parsed_action, resolve_call_parser("hermes"))
    broken = read("so <tool_call>{1}</tool_call>", (1,))
    assert assistant_message(broken, 0) == {"role": "assistant", "content": broken.text}
    assert assistant_message(Action("plain"), 0) == {"role": "assistant", "content": "plain"}
