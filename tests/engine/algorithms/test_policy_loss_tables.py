"""Each policy loss and its gradient against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from engine.algorithms import policy_losses
from engine.algorithms.aggregation import Denominators, aggregate, compute_means
from engine.algorithms.policy_losses import binary_kl, get_policy_loss
from engine.errors import ConfigError, DataError

# Six tokens of log-probability −1, by ratio to the old policy and advantage.
RATIOS = torch.tensor([1.5, 0.5, 1.5, 0.5, 4.0, 1.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
LOG = RATIOS.log().tolist()


def _sapo(ratio: float, advantage: float) -> tuple[float, float]:
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * 4 / tau * gate, -advantage * 4 * gate * (1 - gate) * ratio


SAPO = [_sapo(r, a) for r, a in zip(RATIOS.tolist(), ADVANTAGES.tolist(), strict=True)]
TABLE: list[tuple[str, dict, list[float], list[float]]] = [
    ("vanilla", {}, [-1.2, -0.5, 1.5, 0.8, 3.0, -2.0], [0, -0.5, 1.5, 0, 0, -2]),
    (
        "vanilla",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3},
        [-1.3, -0.5, 1.5, 0.9, 3.0, -2.0],
        [0, -0.5, 1.5, 0, 0, -2],
    ),
    (
        "vanilla",
        {"clip_ratio": 0.6, "clip_ratio_c": None},
        [-1.5, -0.5, 1.5, 0.5, 4.0, -2.0],
        [-1.5, -0.5, 1.5, 0.5, 4.0, -2.0],
    ),
    ("reinforce", {}, [1, 1, -1, -1, -1, 2], [-1, -1, 1, 1, 1, -2]),
    ("gpg", {}, [1, 1, -1, -1, -1, 2], [-1, -1, 1, 1, 1, -2]),
    ("cispo", {}, [1.2, 0.8, -1.2, -0.8, -1.2, 2], [-1.2, -0.8, 1.2, 0.8, 1.2, -2]),
    ("sapo", {}, [loss for loss, _ in SAPO], [slope for _, slope in SAPO]),
    (
        "dro",
        {"dro_beta": 0.2},
        [a + 0.1 * d * d for a, d in zip(ADVANTAGES.tolist(), LOG, strict=True)],
        [-a + 0.2 * d for a, d in zip(ADVANTAGES.tolist(), LOG, strict=True)],
    ),
    # π − π_old = e⁻¹·(1 − 1/ρ): 0.123, −0.368, 0.123, −0.368, 0.276, 0 against ±0.1.
    ("dppo_tv", {"clip_ratio": 0.1}, [0, 0.5, -1.5, 0, -4, 2], [0, -0.5, 1.5, 0, 4, -2]),
    (
        "dppo_tv",
        {"clip_ratio": 0.2, "clip_ratio_c": 3.0},
        [1.5, 0.5, -1.5, 0, -3, 2],
        [-1.5, -0.5, 1.5, 0, 3, -2],
    ),
    # KL(π_old ‖ π) of the first and fourth token, which move away: 0.034 and 0.361.
    ("dppo_kl", {"clip_ratio": 0.2}, [1.5, 0.5, -1.5, 0, -4, 2], [-1.5, -0.5, 1.5, 0, 4, -2]),
    ("dppo_kl", {"clip_ratio": 0.02}, [0, 0.5, -1.5, 0, -4, 2], [0, -0.5, 1.5, 0, 4, -2]),
]


def _run(name: str, prepared: dict[str, Tensor], **options) -> tuple[Tensor, Tensor, dict]:
    log_probs = torch.full((1, 6), -1.0, dtype=torch.float64, requires_grad=True)
    old = log_probs.detach() - RATIOS.log()
    mask = torch.ones(1, 6)
    out = get_policy_loss(name)(log_probs, old, ADVANTAGES[None], mask, **options, **prepared)
    out.loss.sum().backward()
    assert log_probs.grad is not None
    return out.loss[0].detach(), log_probs.grad[0], compute_means(out.metrics)


@pytest.mark.parametrize(("name", "options", "loss", "gradient"), TABLE)
def test_token_losses(name: str, options: dict, loss: list[float], gradient: list[float]) -> None:
    got, slope, metrics = _run(name, {}, **options)
    assert got.tolist() == pytest.approx(loss, abs=1e-9)
    assert slope.tolist() == pytest.approx(gradient, abs=1e-9)
    assert metrics["ppo_kl"] == pytest.approx(-sum(LOG) / 6)


def test_binary_kl_of_the_table() -> None:
    new = torch.tensor(-1.0, dtype=torch.float64)
    p, q = math.exp(-1) / 1.5, math.exp(-1)
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert 0.02 < expected < 0.2
    assert binary_kl(new - math.log(1.5), new).item() == pytest.approx(expected)
    certain = torch.zeros(1)
    assert binary_kl(certain, certain).item() == 0
    assert binary_kl(certain, torch.tensor([-100.0])).isfinite().all()


@pytest.mark.parametrize(
    ("name", "clipped", "lower"),
    [("vanilla", 2 / 6, 1 / 6), ("cispo", 5 / 6, None), ("dppo_tv", 1 / 6, 0.0)],
)
def test_clip_fractions(name: str, clipped: float, lower: float | None) -> None:
    metrics = _run(name, {})[2]
    assert metrics["pg_clipfrac"] == pytest.approx(clipped)
    assert metrics.get("pg_clipfrac_lower") == (None if lower is None else pytest.approx(lower))


SELECTED = {"cov_selected": torch.tensor([[True, False, True, False, True, False]])}


def test_kl_cov_penalises_selected_tokens() -> None:
    loss, slope, metrics = _run("kl_cov", SELECTED, ppo_kl_coef=0.5)
    plain = [-1.5, -0.5, 1.5, 0.5, 4.0, -2.0]
    extra = [0.5 * abs(d) if i % 2 == 0 else 0 for i, d in enumerate(LOG)]
    assert loss.tolist() == pytest.approx([a + b for a, b in zip(plain, extra, strict=True)])
    assert slope.tolist() == pytest.approx([-1, -0.5, 2, 0.5, 4.5, -2])
    assert metrics["cov_selected_frac"] == 0.5


def test_clip_cov_leaves_selected_tokens_out() -> None:
    loss, slope, metrics = _run("clip_cov", SELECTED)
    assert loss.tolist() == pytest.approx([0, -0.5, 0, 0.8, 0, -2])
    assert slope.tolist() == pytest.approx([0, -0.5, 0, 0, 0, -2])
    assert (metrics["cov_selected_frac"], metrics["pg_clipfrac"]) == (0.5, pytest.approx(1 / 6))


def _sequence(name: str, advantage: float, **options) -> tuple[Tensor, Tensor]:
    """One completion with ratios 1.5 and 0.5, a tool's turn between; aggregated."""
    log_probs = torch.tensor([[-1.0, torch.nan, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1 - math.log(1.5), torch.nan, -1 - math.log(0.5)]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1]])
    given = torch.full((1, 3), advantage, dtype=torch.float64)
    out = get_policy_loss(name)(log_probs, old, given, mask, **options)
    total = aggregate(out.loss, mask, "seq-mean-token-mean", Denominators.from_mask(mask))
    total.backward()
    assert log_probs.grad is not None
    return total.detach(), log_probs.grad[0]


def test_gspo_has_one_ratio_a_completion() -> None:
    ratio = math.sqrt(0.75)  # the geometric mean of 1.5 and 0.5
    loss, slope = _sequence("gspo", 1.0, clip_ratio=0.2)
    assert loss.item() == pytest.approx(-ratio)
    assert slope.tolist() == pytest.approx([-ratio / 2, 0, -ratio / 2])
    loss, slope = _sequence("gspo", -1.0, clip_ratio_low=0.1, clip_ratio_high=0.2)
    assert loss.item() == pytest.approx(0.9)
    assert slope.tolist() == [0, 0, 0]


def test_geo_mean_clips_tokens_in_log_space() -> None:
    # A > 0: Δ' = min(Δ, clip(Δ, ±0.3)) = 0.3, log 0.5; the first token has no gradient left.
    ratio = math.exp((0.3 + math.log(0.5)) / 2)
    loss, slope = _sequence("geo_mean", 1.0, clip_ratio=0.3)
    assert loss.item() == pytest.approx(-ratio)
    assert slope.tolist() == pytest.approx([0, 0, -ratio / 2])
    ratio = math.exp((0.2 + math.log(0.5)) / 2)
    loss, _ = _sequence("geo_mean", 1.0, clip_ratio_low=0.1, clip_ratio_high=0.2)
    assert loss.item() == pytest.approx(-ratio)
    ratio = math.exp((math.log(1.5) - 0.1) / 2)
    loss, _ = _sequence("geo_mean", -1.0, clip_ratio_low=0.1, clip_ratio_high=0.2)
    assert loss.item() == pytest.approx(ratio)
    # A < 0: Δ' = max(Δ, clip(Δ, ±0.3)) = log 1.5, −0.3.
    ratio = math.exp((math.log(1.5) - 0.3) / 2)
    loss, slope = _sequence("geo_mean", -2.0, clip_ratio=0.3)
    assert loss.item() == pytest.approx(2 * ratio)
    assert slope.tolist() == pytest.approx([ratio, 0, 0])


def test_importance_weights_multiply_the_loss() -> None:
    weights = torch.tensor([[0.5, 2.0, 0.0, 1.0, 1.0, 3.0]], dtype=torch.float64)
    plain, _, _ = _run("vanilla", {})
    weighted, _, _ = _run("vanilla", {}, rollout_is_weights=weights)
    torch.testing.assert_close(weighted, plain * weights[0])


def test_geo_mean_takes_the_geometric_mean_of_the_weights() -> None:
    weights = torch.tensor([[0.5, torch.nan, 2.0 * math.e]], dtype=torch.float64)
    plain, _ = _sequence("geo_mean", 1.0)
    weighted, _ = _sequence("geo_mean", 1.0, rollout_is_weights=weights)
    assert weighted.item() == pytest.approx(plain.item() * math.exp(0.5))


def test_covariance_selection_by_hand() -> None:
    old = torch.tensor([[-1.0, -2.0, -3.0, torch.nan], [-6.0, -3.0, torch.nan, torch.nan]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    advantage = torch.tensor([[1.0, 1.0, 1.0, torch.inf], [-3.0, 0.0, 9.0, 9.0]])
    # Means −3 and 0: covariances 2, 1, 0 and 9, 0.
    top = policy_losses.prepare("kl_cov", old, advantage, mask, kl_cov_ratio=0.4)["cov_selected"]
    assert top.tolist() == [[True, False, False, False], [True, False, False, False]]
    one = policy_losses.prepare("kl_cov", old, advantage, mask)["cov_selected"]
    assert one.nonzero().tolist() == [[1, 0]]
    between = {"clip_cov_lb": 0.5, "clip_cov_ub": 5.0}
    all_of = policy_losses.prepare("clip_cov", old, advantage, mask, clip_cov_ratio=1.0, **between)
    assert all_of["cov_selected"].nonzero().tolist() == [[0, 0], [0, 1]]
    draws = {
        policy_losses.prepare(
            "clip_cov",
            old,
            advantage,
            mask,
            generator=torch.Generator().manual_seed(seed),
            **between,
        )["cov_selected"]
        .nonzero()
        .tolist()[0][1]
        for seed in range(20)
    }
    assert draws == {0, 1}


def test_selection_from_an_empty_mask() -> None:
    zeros = torch.zeros(2, 3)
    for name in ("kl_cov", "clip_cov"):
        assert not policy_losses.prepare(name, zeros, zeros, zeros)["cov_selected"].any()
    assert policy_losses.prepare("vanilla", zeros, zeros, zeros) == {}


def test_wrong_calls_are_refused() -> None:
    x, mask = torch.zeros(1, 2), torch.ones(1, 2)
    with pytest.raises(ConfigError, match=r"'vanilla' doesn't read 'clip_ration' \(did you mean"):
        get_policy_loss("vanilla")(x, x, x, mask, clip_ration=0.1)
    with pytest.raises(ConfigError, match="'reinforce' doesn't read 'clip_ratio'"):
        get_policy_loss("reinforce")(x, x, x, mask, clip_ratio=0.1)
    with pytest.raises(DataError, match="needs cov_selected"):
        get_policy_loss("kl_cov")(x, x, x, mask)
    with pytest.raises(DataError, match=r"advantages has shape \[1, 3\]"):
        get_policy_loss("vanilla")(x, x, torch.zeros(1, 3), mask)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c=1.0 must be above 1"),
        ("vanilla", {"clip_ratio_low": -0.1}, "clip_ratio_low=-0.1 must not be negative"),
        ("gspo", {"clip_ratio": -1}, "clip_ratio=-1"),
        ("sapo", {"tau_neg": 0}, "tau_neg=0 must be above 0"),
        ("dro", {"dro_beta": 0}, "dro_beta=0 must be above 0"),
        ("kl_cov", {"kl_cov_ratio": 2}, "kl_cov_ratio=2"),
        ("kl_cov", {"ppo_kl_coef": -1}, "ppo_kl_coef=-1"),
        ("clip_cov", {"clip_cov_ratio": 0}, "clip_cov_ratio=0"),
        ("clip_cov", {"clip_cov_lb": 6.0}, "clip_cov_lb=6.0 must be below clip_cov_ub=5.0"),
        ("clip_cov", {"clip_ratio": -1}, "clip_ratio=-1"),
    ],
)
def test_contradictory_options_are_refused(name: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_policy_loss(name).check_options(options)


def test_aggregation_modes_that_would_change_the_method_are_refused() -> None:
    assert policy_losses.aggregation_mode("vanilla") == "token-mean"
    assert policy_losses.aggregation_mode("vanilla", "token-sum") == "token-sum"
    assert policy_losses.aggregation_mode("gspo") == "seq-mean-token-mean"
    assert policy_losses.aggregation_mode("sapo", "token-mean") == "token-mean"
    with pytest.raises(ConfigError, match=r"'token-mean' with loss_mode='geo_mean': .* is defined"):
        policy_losses.aggregation_mode("geo_mean", "token-mean")
    with pytest.raises(ConfigError, match="is unknown"):
        policy_losses.aggregation_mode("vanilla", "mean")
