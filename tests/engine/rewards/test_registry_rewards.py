import sys
from pathlib import Path

import pytest
from once import OwnEntries

from engine.errors import ConfigError
from engine.rewards import reward_function
from engine.rewards.answers import answer_match
from engine.rewards.reward_function import declared_components, register_reward, resolve_reward

MODULE = """
from engine.rewards import register_reward

def ok(prompts, completions, *, ground_truth, **columns):
    return [0.5] * len(completions)

async def ok_async(prompts, completions, ground_truth=None, **columns):
    return [0.5] * len(completions)

class Reward:
    def __call__(self, prompts, completions, *, ground_truth, **columns):
        return [0.25] * len(completions)

ok_object = Reward()

def no_columns(prompts, completions, ground_truth):
    return [0.0] * len(completions)

def one_argument(text):
    return 0.0

number = 3

def scaled(prompts, completions, *, ground_truth, scale: float = 1.0, **columns):
    return [scale] * len(completions)

@register_reward("of_user", components=("a", "b"))
def parts(prompts, completions, *, ground_truth, **columns):
    return {"a": [0.0] * len(completions), "b": [1.0] * len(completions)}
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: OwnEntries) -> str:
    (tmp_path / "user_rewards_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards_of_test", raising=False)
    own_entries(reward_function._registry)
    return "user_rewards_of_test"


def test_built_in_rewards_are_found_by_name() -> None:
    assert resolve_reward("answer_match") is answer_match


@pytest.mark.parametrize(("name", "value"), [("ok", 0.5), ("ok_object", 0.25)])
def test_a_users_reward_is_found_by_its_path(user_module: str, name: str, value: float) -> None:
    reward = resolve_reward(f"{user_module}:{name}")
    assert reward(["p"], ["c"], ground_truth=["1"], other=["x"]) == [value]
    assert callable(resolve_reward(f"{user_module}:ok_async"))


def test_options_stand_in_the_place_of_columns(user_module: str) -> None:
    name = f"{user_module}:scaled"
    rows = (["p"], ["c"])
    assert resolve_reward(name)(*rows, ground_truth=["1"]) == [1.0]
    reward = resolve_reward(name, {"scale": "0.5"})
    assert reward(*rows, ground_truth=["1"], scale=["a column"]) == [0.5]
    with pytest.raises(ConfigError, match=r"reward.options.scal: .*did you mean 'scale'"):
        resolve_reward(name, {"scal": 0.5})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("answer_mach", r"'answer_mach' is unknown .*choose one of .*answer_match"),
        ("{m}:nothing", "has no 'nothing'"),
        ("{m}:number", "not a function"),
        ("{m}:no_columns", r"can't be called .*any_other_column.* write it as"),
        ("{m}:one_argument", "can't be called as a reward function"),
        ("nowhere.at_all:f", r"can't be imported \(ModuleNotFoundError"),
        (":f", "can't be imported"),
    ],
)
def test_wrong_names_are_refused_before_any_rollout(
    user_module: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_reward(name.format(m=user_module))


def test_a_module_that_fails_on_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward_of_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve_reward("broken_reward_of_test:f")


def test_registering_makes_a_name_selectable_once(own_entries: OwnEntries) -> None:
    own_entries(reward_function._registry)

    @register_reward("length")
    def length(prompts, completions, *, ground_truth, **columns):  # type: ignore[no-untyped-def]
        return [float(len(text)) for text in completions]

    assert resolve_reward("length") is length
    register_reward("length")(length)
    with pytest.raises(ConfigError, match="'length' is already registered"):
        register_reward("length")(answer_match)


def test_declared_components_are_known_before_any_call(user_module: str) -> None:
    assert declared_components("answer_match") == ()
    assert declared_components(f"{user_module}:ok") is None
    assert declared_components(f"{user_module}:ok_object") is None
    assert declared_components(f"{user_module}:parts") == ("a", "b")
    assert declared_components("of_user") == ("a", "b")
    with pytest.raises(ConfigError, match="'of_usr' is unknown"):
        declared_components("of_usr")


@pytest.mark.parametrize("components", ["answer", ("answer", "format", "answer")])
def test_wrong_declarations_are_refused(components: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"reward 'x' declares .* a tuple of different names"):
        register_reward("x", components=components)
