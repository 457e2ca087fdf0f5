"""Groups of episodes whose weights change under way, and that go on elsewhere from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_games import DigitGame, NotedGame, SavedGame, UnsavableGame
from tiny_engine import arithmetic_rows
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from engine.agents.agent_loop import Environments, EpisodePlayer, LocalEnvironments
from engine.agents.environment_pool import EnvironmentPool
from engine.agents.episode import (
    Episode,
    EpisodeLimits,
    EpisodeTokenizer,
    PartialEpisodes,
    plain_action,
)
from engine.batch import Batch
from engine.checkpoint.state_dict import extract_tensors, insert_tensors
from engine.data.collate import collate_prompts
from engine.data.templates import encode_prompts
from engine.data.tokenizer import load_tokenizer
from engine.errors import RolloutError
from engine.rollout.native import NativeEngine
from engine.rollout.protocol import SamplingParams
from engine.rollout.stream import PartialGroup, with_partial_groups
from engine.workers.agent_rollout import EpisodeGroups, SavedRollout

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, N = arithmetic_rows(4), 2
TOKENS = ("responses", "response_mask", "token_versions", "environment_rewards", "truncated")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_folder)


@pytest.fixture
def model(tiny_folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()


class Hall:
    """Opens groups of episodes over one model."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.tokenizer = NativeEngine(model, max_model_len=64), tokenizer
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
            EpisodePlayer(stream, environments, concurrency=width, call_seconds=20.0),
            lambda key, index, ids: Episode(key, 0, index, turns, limits, ids),
            n=n,
            pad_token_id=0,
            branches=False,
        )

    def prompts(self, keys: list[int]) -> Batch:
        rows = [ROWS[key] for key in keys]
        ids = encode_prompts(self.tokenizer, [row["prompt"] for row in rows], "rows")
        return collate_prompts(rows, ids) | {"group_ids": torch.tensor(keys)}


@pytest.fixture
def hall(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> Any:
    subject = Hall(model, tokenizer)
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
    hall: Hall, model: torch.nn.Module, tiny_folder: Path
) -> None:
    groups = hall.groups(DigitGame)
    groups.submit(hall.prompts([0, 1, 2, 3]))
    found: dict[int, Batch] = {}
    models = [AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()]
    for version in (1, 2):
        for _ in range(4):
            found |= {int(group["group_ids"][0]): group for group in groups.step()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        twin = AutoModelForCausalLM.from_pretrained(tiny_folder).double().eval()
        twin.load_state_dict(model.state_dict())
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
    assert len(SavedGame.resets) == len(ROWS) * N  # none was begun twice
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
