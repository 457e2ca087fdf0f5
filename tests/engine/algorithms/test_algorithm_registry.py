"""Discovery, options, names in the docs, and what the package may import."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from once import OwnEntries

import engine.algorithms
from engine.algorithms import advantages, policy_losses, preference_losses
from engine.algorithms.advantages import AdvantageInputs, AdvantageOutputs
from engine.algorithms.aggregation import MODES
from engine.algorithms.correction import CRITERIA
from engine.algorithms.divergences import NAMES as KL_NAMES
from engine.errors import ConfigError

FOLDER = Path(inspect.getfile(engine.algorithms)).parent
PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_every_entry_of_the_field_is_there() -> None:
    assert set(advantages.names()) >= {
        "gae",
        "gdpo",
        "gpg",
        "grpo",
        "grpo_passk",
        "maxrl",
        "opo",
        "optimal_token_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
    }
    assert set(policy_losses.names()) >= {
        "cispo",
        "clip_cov",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "geo_mean",
        "gpg",
        "gspo",
        "kl_cov",
        "reinforce",
        "sapo",
        "vanilla",
    }
    assert set(preference_losses.names()) >= {"sigmoid", "hinge", "ipo", "robust", "orpo", "simpo"}


def test_options_are_declared_with_their_defaults() -> None:
    assert advantages.options("gae") == {"gamma": 1.0, "lam": 1.0, "whiten": True}
    assert advantages.options("rloo") == {}
    assert policy_losses.options("vanilla") == {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "clip_ratio_c": 3.0,
    }
    assert set(policy_losses.options("kl_cov")) == {"ppo_kl_coef", "kl_cov_ratio"}
    assert advantages.requires("gae") == {"values"}


def test_unknown_names_and_options_say_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"'grop' is unknown \(did you mean 'grpo'\?\); choose one of gae"
    ):
        advantages.get_advantage("grop")
    with pytest.raises(
        ConfigError, match=r"policy_loss.loss_mode='zzzz' is unknown; choose one of cispo"
    ):
        policy_losses.get_policy_loss("zzzz")
    with pytest.raises(ConfigError, match=r"'rloo' doesn't read 'gamma'; remove it .*no options"):
        advantages.get_advantage("rloo")(None, gamma=1.0)  # type: ignore[arg-type]


def test_aliases_are_the_same_entry() -> None:
    assert advantages.get_advantage("rloo_vectorized") is advantages.get_advantage("rloo")
    assert preference_losses.get_pair_loss("dpo") is preference_losses.get_pair_loss("sigmoid")


def test_a_name_is_registered_once_and_requirements_are_known() -> None:
    def formula(inputs: AdvantageInputs) -> AdvantageOutputs:
        return AdvantageOutputs(inputs.token_level_rewards, inputs.token_level_rewards)

    with pytest.raises(ConfigError, match="'grpo' is already registered"):
        advantages.register_advantage("grpo")(formula)
    with pytest.raises(ConfigError, match=r"requires unknown \['critic'\]"):
        advantages.register_advantage("mine", requires=("critic",))


def test_a_new_file_is_found_without_touching_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_entries: OwnEntries
) -> None:
    package = tmp_path / "their_estimators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "constant.py").write_text(
        "import torch\n"
        "from engine.algorithms.advantages import AdvantageOutputs, register_advantage\n"
        "@register_advantage('constant_for_test')\n"
        "def constant(inputs, *, level: float = 2.0):\n"
        "    full = torch.full_like(inputs.token_level_rewards, level)\n"
        "    return AdvantageOutputs(full, full)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = advantages._registry
    own_entries(registry)
    monkeypatch.setattr(registry, "_unread", ["their_estimators.constant"])
    import torch

    inputs = AdvantageInputs(
        torch.zeros(1, 2), torch.tensor([[1, 0]]), torch.zeros(1, dtype=torch.long)
    )
    got = advantages.get_advantage("constant_for_test")(inputs, level=3.0)
    assert got.advantages.tolist() == [[3.0, 0.0]]
    assert "constant_for_test" in advantages.names()


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda p: p.stem)
def test_files_are_documented_and_import_only_errors_of_ours(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what lives in it"
    for node in ast.walk(tree):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            allowed = name.startswith("engine.algorithms")
            allowed |= name in ("engine.errors", "engine.registry")
            assert allowed or not name.startswith(("engine", "tasks", "workflows")), name


@pytest.mark.parametrize(
    "entry",
    [
        *(advantages.get_advantage(name).formula for name in advantages.names()),
        *(policy_losses.get_policy_loss(name).formula for name in policy_losses.names()),
        *(preference_losses.get_pair_loss(name).formula for name in preference_losses.names()),
    ],
    ids=lambda f: f.__name__,
)
def test_every_entry_cites_its_source(entry) -> None:
    assert re.search(r"Source: .+", inspect.getdoc(entry) or "")


@pytest.mark.parametrize(
    "name",
    [
        *advantages.names(),
        *policy_losses.names(),
        *preference_losses.names(),
        *MODES,
        *(name for name in KL_NAMES if not name.endswith("+")),
        *CRITERIA,
        "kto",
        "bradley_terry",
    ],
)
def test_the_page_names_every_entry(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text()


@pytest.mark.parametrize(
    "registry", [advantages, policy_losses, preference_losses], ids=lambda m: m.__name__
)
def test_the_page_names_every_option(registry) -> None:
    text = PAGE.read_text()
    for name in registry.names():
        for option in registry.options(name):
            assert f"`{option}`" in text, (name, option)
