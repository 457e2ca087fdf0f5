"""Episodes: one by one, in groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_games import DigitGame, FaultyGame, NotedGame, SavedGame, UnsavableGame
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from engine.agents.agent_loop import Environments, EpisodePlayer, LocalEnvironments
from engine.agents.environment_pool import EnvironmentPool, EnvironmentProcess
from engine.agents.environment_protocol import EnvironmentFailure, Observation
from engine.agents.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    History,
    PartialEpisodes,
    collate_episodes,
    plain_action,
)
from engine.batch import Batch
from engine.checkpoint.state_dict import extract_tensors, insert_tensors
from engine.data.collate import collate_prompts
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.errors import RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.native.native_stream import NativeStream
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import PartialCompletion, PartialGroup, with_partial_groups
from engine.workers.agent_rollout import EpisodeGroups, SavedRollout

pytestmark = pytest.mark.usefixtures("one_thread")


ROWS = arithmetic_rows(3)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_folder)


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()


class Table:
    """Plays episodes of `ROWS`."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = NativeEngine(model, max_model_len=64), tokenizer
        self.stop = (tokenizer.eos_token_id,)
        self.prefilled = 0

    def play(
        self,
        make: Callable[[], Any] | None,
        *,
        n: int = 2,
        width: int = 16,
        places: int = 0,
        keep: bool = True,
        call_seconds: float = 20.0,
        failure_reward: float | None = None,
        pool: Any = None,
        history: History = "append",
        **limits: Any,
    ) -> list[Episode]:
        sizes = {"max_response_length": 40, "max_model_len": 64, "max_turn_length": 5} | limits
        turns = EpisodeTokenizer(self.tokenizer, self.stop, plain_action, history)
        prompts = encode_prompts(self.tokenizer, [row["prompt"] for row in ROWS], "rows")
        episodes = [
            Episode(row, row, index, turns, EpisodeLimits(**sizes), prompts[row])
            for row in range(len(ROWS))
            for index in range(n)
        ]
        params = SamplingParams(max_new_tokens=40, seed=4, stop_token_ids=self.stop)
        stream = self.engine.stream(params, max_num_seqs=width, keep_prefixes=keep)
        environments = LocalEnvironments(make, timeout_s=call_seconds) if make else pool
        player = EpisodePlayer(
            stream,
            environments,
            concurrency=places or width,
            failure_reward=failure_reward,
        )
        player.play(episodes, ROWS)
        environments.close()
        self.prefilled = stream.stats.prefill_tokens
        assert stream._prefixes is None or not stream._prefixes.tokens
        stream.close()
        return episodes


@pytest.fixture
def table(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> Table:
    return Table(model, tokenizer)


def sequences(episodes: Sequence[Episode]) -> list[tuple[list[int], list[float]]]:
    found = []
    for episode in episodes:
        assert episode.transcript is not None
        [one] = episode.transcript.finished()
        found.append((one.ids, one.log_probs))
    return found


def test_every_sampled_token_has_the_models_log_prob_for_the_very_ids(
    table: Table, model: torch.nn.Module
) -> None:
    for episode in table.play(DigitGame):
        assert (episode.end, episode.error) == ("done", "")
        assert episode.transcript is not None
        [one] = episode.transcript.finished()
        assert episode.transcript.turns == 3
        assert one.sampled[-1]
        assert not all(one.sampled)
        with torch.no_grad():
            logits = model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
        own = logits[:-1].gather(1, torch.tensor(one.ids)[1:, None])[:, 0]
        start = len(one.prompt_ids) - 1
        kept = torch.tensor(one.sampled)
        torch.testing.assert_close(
            own[start:][kept].float(), torch.tensor(one.log_probs)[kept], rtol=1e-4, atol=1e-5
        )
        assert [r for r in one.rewards if r] == [r for r in episode.turn_rewards if r]
        by_turn = [i for i, own in enumerate(one.sampled) if own and not [*one.sampled, 0][i + 1]]
        assert [one.rewards[i] for i in by_turn] == pytest.approx(episode.turn_rewards)


def test_slots_arrivals_and_kept_prefixes_change_no_token(table: Table) -> None:
    whole = sequences(table.play(DigitGame, keep=False))
    computed = table.prefilled
    kept = sequences(table.play(DigitGame))
    assert table.prefilled < 0.7 * computed  # a returning episode computes what is new
    narrow = sequences(table.play(lambda: DigitGame(delay=0.002), width=2))
    for other in (kept, narrow):
        assert [ids for ids, _ in other] == [ids for ids, _ in whole]
        for (_, ours), (_, theirs) in zip(other, whole, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_group_s_equal_prompts_are_computed_once(table: Table) -> None:
    table.play(lambda: DigitGame(turns=1), n=4)
    prompts = encode_prompts(table.tokenizer, [row["prompt"] for row in ROWS], "rows")
    assert table.prefilled < 2 * sum(map(len, prompts))  # of 4 times as many


def test_environments_are_asked_side_by_side(table: Table) -> None:
    begun = time.monotonic()
    episodes = table.play(lambda: DigitGame(turns=2, delay=0.3), n=8)
    assert {episode.end for episode in episodes} == {"done"}
    assert time.monotonic() - begun < 24 * 2 * 0.3 / 3


def test_limits_end_episodes_and_lose_no_reward(table: Table) -> None:
    by_turns = table.play(lambda: DigitGame(turns=9), max_turns=2)
    by_tokens = table.play(lambda: DigitGame(turns=99))
    by_time = table.play(lambda: DigitGame(turns=99, delay=1.0), seconds=0.9)
    for episodes, end in ((by_turns, "turns"), (by_tokens, "tokens"), (by_time, "seconds")):
        for episode in episodes:
            assert episode.end == end
            assert episode.truncated
            assert episode.transcript is not None
            [one] = episode.transcript.finished()
            assert len(one.token_ids) <= 40
            assert sum(one.rewards) == pytest.approx(sum(episode.turn_rewards))
            assert len(episode.turn_rewards) == episode.transcript.turns
    assert {episode.transcript.turns for episode in by_turns if episode.transcript} == {2}
    assert {episode.transcript.turns for episode in by_time if episode.transcript} == {1}


@pytest.mark.parametrize("drop", [False, True])
def test_a_turn_that_takes_too_long_is_cut_and_is_the_last(
    table: Table, monkeypatch: pytest.MonkeyPatch, drop: bool
) -> None:
    free = table.play(lambda: DigitGame(turns=9), max_turn_length=12)
    whole = [episode.transcript.sequences[0].token_ids for episode in free if episode.transcript]
    step = NativeStream.step

    def slowly(stream: NativeStream) -> Any:
        time.sleep(0.02)
        return step(stream)

    monkeypatch.setattr(NativeStream, "step", slowly)
    for width in (16, 2):  # with and without those that wait for a slot
        episodes = table.play(
            lambda: DigitGame(turns=9),
            width=width,
            max_turn_length=12,
            turn_seconds=0.05,
            drop=drop,
        )
        for episode, tokens in zip(episodes, whole, strict=True):
            assert episode.transcript is not None
            [one] = episode.transcript.finished()
            assert one.token_ids == tokens[: len(one.token_ids)]
            assert sum(one.rewards) == pytest.approx(sum(episode.turn_rewards))
            assert len(episode.turn_rewards) == episode.transcript.turns
            if episode.end == "turn_seconds":
                assert (episode.truncated, episode.dropped) == (True, drop)
                assert len(one.token_ids) < len(tokens)
        assert sum(episode.end == "turn_seconds" for episode in episodes) >= 4


@pytest.mark.parametrize("fault", ["raise", "hang", "lie", "nonsense"])
def test_an_environment_that_fails_costs_its_episode(table: Table, fault: str) -> None:
    made: list[DigitGame] = []

    def make() -> DigitGame:
        made.append(FaultyGame(fault=fault) if len(made) == 1 else DigitGame(turns=2))
        return made[-1]

    def make_faulty() -> DigitGame:
        return FaultyGame(fault=fault)

    episodes = table.play(make, call_seconds=1.0)
    assert sorted(episode.end or "" for episode in episodes) == ["done"] * 5 + ["failed"]
    [failed] = [episode for episode in episodes if episode.end == "failed"]
    assert failed.dropped
    assert made[1].closed
    said = {"raise": "dice", "hang": "within 1 s", "lie": "finite", "nonsense": "returned str"}
    assert said[fault] in failed.error
    [scored] = [
        one
        for one in table.play(make_faulty, n=1, call_seconds=0.5, failure_reward=-1.0)[:1]
        if one.end == "failed"
    ]
    assert (scored.dropped, scored.turn_rewards[-1]) == (False, -1.0)


class Lost(DigitGame):
    """Its process ends for another episode's sake, each time."""

    resets = 0

    async def reset(self, row: Any) -> Any:
        Lost.resets += 1
        raise EnvironmentFailure("lost", "the process is gone")


def test_an_episode_that_is_lost_again_and_again_fails(table: Table) -> None:
    Lost.resets = 0
    episodes = table.play(Lost, n=1)
    assert [episode.end for episode in episodes] == ["failed"] * 3
    assert Lost.resets == 3 * 3, "two restarts each"


def test_a_saved_turn_goes_on_unless_it_is_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = EpisodeTokenizer(tokenizer, (tokenizer.eos_token_id,), plain_action)
    saved = PartialCompletion(0, [5, 6], [-1.0, -1.0], [0, 1])
    for longest, expected in ((3, saved), (2, None)):
        limits = EpisodeLimits(40, 64, max_turn_length=longest)
        episode = Episode(0, 0, 0, turns, limits, [1])
        episode.begin(ROWS[0]["prompt"], Observation())
        turn = episode.next_turn(0.0, saved)
        assert turn is not None
        assert (turn.partial, turn.max_new_tokens) == (expected, longest)


@pytest.mark.slow
def test_episodes_are_begun_again_whose_process_ended_for_another_s_sake(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls come one by one, so that no other episode is in one when the process ends."""
    real = EnvironmentProcess.call

    def answered(*call: Any) -> Future[Any]:
        answer = real(*call)
        wait([answer], 60)
        return answer

    monkeypatch.setattr(EnvironmentProcess, "call", answered)
    whole = table.play(DigitGame)
    bad = [row["prompt"][0]["content"].startswith("0") for row in ROWS]
    options = {"fault": "die", "prompt": "0"}
    with EnvironmentPool("digit_games:SometimesGone", options, processes=1) as pool:
        episodes = table.play(None, pool=pool, width=1, places=6)
    assert bad == [True, False, False]
    for episode, free in zip(episodes, whole, strict=True):
        assert episode.transcript is not None
        assert free.transcript is not None
        if bad[episode.row]:
            assert episode.end == "failed"
            assert "ended with exit status 1" in episode.error
            continue
        assert (episode.end, episode.transcript.ids) == ("done", free.transcript.ids)
        assert episode.turn_rewards == pytest.approx(free.turn_rewards)


def test_rows_of_episodes_attend_to_all_and_learn_from_what_was_sampled(table: Table) -> None:
    episodes = table.play(DigitGame)
    ids = encode_prompts(table.tokenizer, [row["prompt"] for row in ROWS], "rows")
    batch = collate_episodes(collate_prompts(ROWS, ids), episodes, pad_token_id=0)
    assert isinstance(batch, Batch)
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2]
    width = batch["responses"].shape[1]
    mask, attended = batch["response_mask"].bool(), batch["attention_mask"][:, -width:].bool()
    assert bool((attended | ~mask).all())
    assert bool((attended & ~mask).any(1).all())
    assert bool((batch["rollout_log_probs"][~mask] == 0).all())
    assert bool((batch["environment_rewards"][~mask] == 0).all())
    totals = [sum(episode.turn_rewards) for episode in episodes]
    assert batch["environment_rewards"].sum(1).tolist() == pytest.approx(totals)
    assert batch.columns["episode_turns"].tolist() == [3] * 6
    for row, episode in enumerate(episodes):
        assert episode.transcript is not None
        present = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][present].tolist() == episode.transcript.ids
        positions = batch["position_ids"][row][present].tolist()
        assert positions == list(range(len(positions)))


GROUP_ROWS, N = arithmetic_rows(4), 2


TOKENS = ("responses", "response_mask", "token_versions", "environment_rewards", "truncated")


@pytest.fixture
def group_model(tiny_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()


class Hall:
    """Opens groups of episodes over one model."""

    def __init__(self, group_model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = NativeEngine(group_model, max_model_len=64), tokenizer
        self.opened: list[Environments] = []

    def groups(
        self, made: Callable[[], Any] | Environments, *, width: int = 16, n: int = N
    ) -> EpisodeGroups:
        stop = (self.tokenizer.eos_token_id,)
        turns = EpisodeTokenizer(self.tokenizer, stop, plain_action)
        limits = EpisodeLimits(max_response_length=40, max_model_len=64, max_turn_length=5)
        params = SamplingParams(max_new_tokens=40, seed=4, stop_token_ids=stop)
        stream = self.engine.stream(params, max_num_seqs=width, keep_prefixes=True)
        environments = LocalEnvironments(made, timeout_s=20.0) if callable(made) else made
        self.opened.append(environments)
        return EpisodeGroups(
            stream,
            EpisodePlayer(stream, environments, concurrency=width),
            lambda key, index, ids: Episode(key, 0, index, turns, limits, ids),
            n=n,
            pad_token_id=0,
            branches=False,
        )

    def prompts(self, keys: list[int]) -> Batch:
        rows = [GROUP_ROWS[key] for key in keys]
        ids = encode_prompts(self.tokenizer, [row["prompt"] for row in rows], "rows")
        return collate_prompts(rows, ids) | {"group_ids": torch.tensor(keys)}


@pytest.fixture
def hall(group_model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> Any:
    subject = Hall(group_model, tokenizer)
    yield subject
    for environments in subject.opened:
        environments.close()


def finish(groups: EpisodeGroups, found: dict[int, Batch]) -> dict[int, Batch]:
    while groups.busy:
        found |= {int(group["group_ids"][0]): group for group in groups.step()}
    return found


def assert_same(found: dict[int, Batch], wanted: dict[int, Batch]) -> None:
    assert found.keys() == wanted.keys()
    for key, group in wanted.items():
        assert all(torch.equal(found[key][name], group[name]) for name in TOKENS)
        torch.testing.assert_close(found[key]["rollout_log_probs"], group["rollout_log_probs"])
        for name in ("episode_end", "episode_turns", "episode_reward", "episode_info"):
            assert list(found[key].columns[name]) == list(group.columns[name])


def test_tokens_carry_the_version_of_the_weights_that_drew_them(
    hall: Hall, group_model: torch.nn.Module, tiny_folder: Path
) -> None:
    groups = hall.groups(DigitGame)
    groups.submit(hall.prompts([0, 1, 2, 3]))
    found: dict[int, Batch] = {}
    models = [AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()]
    for version in (1, 2):
        for _ in range(4):
            found |= {int(group["group_ids"][0]): group for group in groups.step()}
        with torch.no_grad():
            for parameter in group_model.parameters():
                parameter.mul_(1.1)
        twin = AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()
        twin.load_state_dict(group_model.state_dict())
        models.append(twin)
        groups.update_weights(version)
        assert groups.version == version
    finish(groups, found)
    assert len(found) == 4
    mixed = 0
    for group in found.values():
        kept, versions = group["response_mask"].bool(), group["token_versions"]
        assert group["policy_version"].tolist() == [
            int(row[own].min()) for row, own in zip(versions, kept, strict=True)
        ]
        width = kept.shape[1]
        for row in range(len(group)):
            used = versions[row][kept[row]].tolist()
            assert used == sorted(used)
            mixed += len(set(used)) > 1
            ids = group["input_ids"][row][group["attention_mask"][row].bool()]
            with torch.no_grad():
                every = torch.stack([m(ids[None]).logits[0].log_softmax(-1) for m in models])
            start = int(group["attention_mask"][row][:-width].sum()) - 1
            at = torch.arange(width)[kept[row]]
            own = every[torch.tensor(used), start + at, ids[start + 1 + at]]
            torch.testing.assert_close(
                own.float(), group["rollout_log_probs"][row][kept[row]], rtol=1e-4, atol=1e-5
            )
    assert mixed > 0


def test_a_long_episode_holds_nobody(hall: Hall) -> None:
    made: list[DigitGame] = []

    def make() -> DigitGame:
        made.append(DigitGame(turns=2, delay=1.0 if len(made) == 3 else 0.0))
        return made[-1]

    groups = hall.groups(make)
    groups.submit(hall.prompts([0, 1, 2, 3]))
    begun, first = time.monotonic(), 0
    while first < 3:
        first += len(groups.step())
    assert time.monotonic() - begun < 0.9
    assert groups.busy >= 1
    assert len(finish(groups, {})) == 1


@pytest.mark.parametrize("steps", [0, 1, 4, 11])
def test_episodes_go_on_in_another_process_from_their_checkpoint(hall: Hall, steps: int) -> None:
    whole = hall.groups(SavedGame)
    whole.submit(hall.prompts([0, 1, 2, 3]))
    expected = finish(whole, {})
    SavedGame.resets.clear()
    NotedGame.steps = 0
    first = hall.groups(SavedGame, width=5)
    first.submit(hall.prompts([0, 1, 2, 3]))
    found: dict[int, Batch] = {}
    for _ in range(steps):
        found |= {int(group["group_ids"][0]): group for group in first.step()}
    partial = first.partial_groups()
    assert found.keys() | partial.keys() == set(range(4))
    saved = sum(len(one.episodes) for one in partial.values())
    begun = len(SavedGame.resets)
    assert saved == begun - N * len(found)
    assert (steps > 0) == (begun > 0)
    values, tensors = extract_tensors({str(key): one.tree() for key, one in partial.items()})
    trees = insert_tensors(values, tensors)
    second = hall.groups(SavedGame)
    asked = NotedGame.steps
    if partial:
        keys = sorted(partial)
        restored = [PartialEpisodes.from_tree(trees[str(key)]) for key in keys]
        second.submit(with_partial_groups(hall.prompts(keys), restored))
    assert_same(finish(second, dict(found)), expected)
    assert len(SavedGame.resets) == len(GROUP_ROWS) * N  # none was begun twice
    turns = sum(int(group.columns["episode_turns"].sum()) for group in expected.values())
    assert NotedGame.steps == turns
    assert asked <= turns
    first.close()


def test_what_can_t_be_saved_is_begun_again(hall: Hall) -> None:
    whole = hall.groups(DigitGame)
    whole.submit(hall.prompts([0, 1]))
    expected = finish(whole, {})
    for make in (DigitGame, UnsavableGame):
        first = hall.groups(make)
        first.submit(hall.prompts([0, 1]))
        for _ in range(4):
            first.step()
        partial = first.partial_groups()
        assert [len(one.episodes) for one in partial.values()] == [0, 0]
        second = hall.groups(make)
        second.submit(with_partial_groups(hall.prompts([0, 1]), [partial[0], partial[1]]))
        assert_same(finish(second, {}), expected)
        assert_same(finish(first, {}), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SavedGame", "UnsavableGame"])
def test_so_it_is_with_environments_in_processes_of_their_own(hall: Hall, name: str) -> None:
    whole = hall.groups(DigitGame)
    whole.submit(hall.prompts([0, 1]))
    expected = finish(whole, {})
    with EnvironmentPool(f"digit_games:{name}", processes=1) as pool:
        first = hall.groups(pool)
        first.submit(hall.prompts([0, 1]))
        first.step()
        for _ in range(4):
            first.step()
        partial = first.partial_groups(20.0)
        saved = N if name == "SavedGame" else 0
        assert [len(one.episodes) for one in partial.values()] == [saved, saved]
        second = hall.groups(pool)
        second.submit(with_partial_groups(hall.prompts([0, 1]), [partial[0], partial[1]]))
        assert_same(finish(second, {}), expected)
        assert_same(finish(first, {}), expected)


def test_a_saved_rollout_is_for_the_same_rollout_alone(hall: Hall, tmp_path: Path) -> None:
    prompts = hall.prompts([0, 1])
    groups = hall.groups(SavedGame)
    groups.submit(prompts)
    for _ in range(4):
        groups.step()
    partial = groups.partial_groups()
    run, later = str(tmp_path / "run"), str(tmp_path / "later")
    first = SavedRollout(run, "rollout-0", "settings", 0.001)
    identity = first.identity(prompts, version=3, seed=7, n=N)
    assert first.begin(identity) == {}
    time.sleep(0.002)
    first.save(identity, lambda: partial)

    def begin(folder: str, settings: str = "settings", version: int = 3, before: str = "") -> Any:
        again = SavedRollout(folder, "rollout-0", settings, 60.0, before)
        return again.begin(again.identity(prompts, version=version, seed=7, n=N))

    for found in (begin(run), begin(later, before=run)):
        assert found.keys() == partial.keys()
        for key, one in found.items():
            assert one.oldest_version == partial[key].oldest_version == 0
            assert [tree["told"] for tree in one.episodes] == [
                tree["told"] for tree in partial[key].episodes
            ]
    assert begin(run, "others") == begin(run, version=4) == begin(later) == {}
    [file] = (tmp_path / "run" / "episodes").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert begin(run) == {}
    first.end()
    assert not file.exists()
    assert first.begin(identity) == {}  # the first rollout alone goes on


def test_completions_of_one_turn_are_no_episodes(hall: Hall) -> None:
    groups = hall.groups(DigitGame)
    with pytest.raises(RolloutError, match="completions of one turn"):
        groups.submit(with_partial_groups(hall.prompts([0]), [PartialGroup((), ())]))
