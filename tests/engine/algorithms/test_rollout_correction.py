"""Importance weights, rejection and mismatch metrics by hand, and their edges."""

import math

import pytest
import torch

from engine.algorithms.aggregation import Denominators, aggregate
from engine.algorithms.correction import CRITERIA, correct_rollout, parse_criteria
from engine.algorithms.policy_losses import get_policy_loss
from engine.errors import ConfigError, DataError

NAN = math.nan
# π_old/π_rollout by token: 2, 0.5, 4 | 1, 0.1; a tool's turn in the second row.
RATIO = torch.tensor([[2.0, 0.5, 4.0], [1.0, NAN, 0.1]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, NAN, -2.0]], dtype=torch.float64)
OLD = ROLLOUT + RATIO.log()


def _weights(**options) -> list[list[float]]:
    out = correct_rollout(OLD, ROLLOUT, MASK, **options)
    assert out.weights is not None
    return out.weights.tolist()


def _near(*rows: list[float]) -> list[list[object]]:
    return [[pytest.approx(x) for x in row] for row in rows]


def test_truncated_and_masked_weights_by_token() -> None:
    assert _weights(rollout_is="token") == _near([2, 0.5, 2], [1, 0, 0.1])
    assert _weights(rollout_is="token", rollout_is_threshold=3) == _near([2, 0.5, 3], [1, 0, 0.1])
    masked = _weights(rollout_is="token", rollout_is_threshold="0.4_2.5")
    assert masked == _near([2, 0.5, 0], [1, 0, 0])


def test_weights_by_sequence_are_products() -> None:
    assert _weights(rollout_is="sequence", rollout_is_threshold=10) == _near([4] * 3, [0.1, 0, 0.1])
    assert _weights(rollout_is="sequence") == _near([2] * 3, [0.1, 0, 0.1])


def test_batch_normalisation_has_mean_one() -> None:
    mean = (2 + 0.5 + 2 + 1 + 0.1) / 5
    by_token = _weights(rollout_is="token", rollout_is_batch_normalize=True)
    assert by_token == _near([2 / mean, 0.5 / mean, 2 / mean], [1 / mean, 0, 0.1 / mean])
    mean = (2 + 0.1) / 2  # one weight a completion, whatever its length
    by_row = _weights(rollout_is="sequence", rollout_is_batch_normalize=True)
    assert by_row == _near([2 / mean] * 3, [0.1 / mean, 0, 0.1 / mean])


def test_all_weights_zero_normalise_to_zero() -> None:
    got = _weights(
        rollout_is="token", rollout_is_threshold="50_60", rollout_is_batch_normalize=True
    )
    assert got == [[0, 0, 0], [0, 0, 0]]


def test_off_changes_nothing_and_still_measures() -> None:
    out = correct_rollout(OLD, ROLLOUT, MASK)
    assert out.weights is None
    assert out.response_mask is MASK
    assert out.metrics["kl"] == pytest.approx(-RATIO[MASK.bool()].log().mean().item())


# k1 = −log ratio; row 0: −0.693, 0.693, −1.386 (sum −1.386), row 1: 0, 2.303 (sum 2.303).
# k2: 0.240, 0.240, 0.961 | 0, 2.651. k3 = ratio − 1 − log ratio: 0.307, 0.193, 1.614 | 0, 1.403.
REJECTION = [
    ("token_k1", "0.4_3", [[1, 1, 0], [1, 0, 0]]),
    ("token_k1", "0.2_3", [[1, 1, 1], [1, 0, 0]]),
    ("token_k1", "3", [[1, 1, 0], [1, 0, 0]]),
    ("token_k2", "0.5", [[1, 1, 0], [1, 0, 0]]),
    ("token_k3", "0.2", [[0, 1, 0], [1, 0, 0]]),
    ("seq_sum_k1", "0.2_5", [[1, 1, 1], [0, 0, 0]]),
    ("seq_sum_k2", "2", [[1, 1, 1], [0, 0, 0]]),
    ("seq_sum_k3", "1.5", [[0, 0, 0], [1, 0, 1]]),
    ("seq_mean_k1", "0.5_3", [[1, 1, 1], [0, 0, 0]]),
    ("seq_mean_k2", "0.5", [[1, 1, 1], [0, 0, 0]]),
    ("seq_mean_k3", "0.703", [[0, 0, 0], [1, 0, 1]]),
    ("seq_max_k1", "0.2_3", [[1, 1, 1], [0, 0, 0]]),
    ("seq_max_k2", "1", [[1, 1, 1], [0, 0, 0]]),
    ("seq_max_k3", "1.5", [[0, 0, 0], [1, 0, 1]]),
    ("token_k2,seq_sum_k3", "0.5,1.5", [[0, 0, 0], [1, 0, 0]]),
]


@pytest.mark.parametrize(("rollout_rs", "threshold", "kept"), REJECTION)
def test_rejection_by_hand(rollout_rs: str, threshold: str, kept: list[list[int]]) -> None:
    out = correct_rollout(OLD, ROLLOUT, MASK, rollout_rs=rollout_rs, rollout_rs_threshold=threshold)
    # seq_mean_k3 of row 0 is 0.7048, of row 1 0.7013: the threshold lies between.
    assert out.response_mask.tolist() == kept
    assert out.response_mask.dtype == MASK.dtype
    lost = 5 - sum(map(sum, kept))
    assert out.metrics["rollout_rs_masked_fraction"] == pytest.approx(lost / 5)


def test_every_criterion_is_in_the_table() -> None:
    assert {name for names, _, _ in REJECTION for name in names.split(",")} == set(CRITERIA)


def test_weights_and_normalisation_use_the_edited_mask() -> None:
    out = correct_rollout(
        OLD,
        ROLLOUT,
        MASK,
        rollout_is="token",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k2",
        rollout_rs_threshold=0.5,
    )
    mean = (2 + 0.5 + 1) / 3
    assert out.weights is not None
    assert out.weights.tolist() == _near([2 / mean, 0.5 / mean, 0], [1 / mean, 0, 0])
    assert out.metrics["rollout_is_mean"] == pytest.approx(mean)


def test_a_rejected_batch_is_averaged_over_what_is_left() -> None:
    """Token-mean after rejection is the plain mean over the surviving tokens."""
    out = correct_rollout(OLD, ROLLOUT, MASK, rollout_rs="token_k2", rollout_rs_threshold=0.5)
    loss = get_policy_loss("reinforce")(OLD, OLD, torch.ones(2, 3), out.response_mask).loss
    got = aggregate(
        loss, out.response_mask, "token-mean", Denominators.from_mask(out.response_mask)
    )
    assert got.item() == pytest.approx(-(OLD[0, 0] + OLD[0, 1] + OLD[1, 0]).item() / 3)


def test_metrics_by_hand() -> None:
    out = correct_rollout(OLD, ROLLOUT, MASK, rollout_is="token", rollout_is_threshold=2.5)
    ratios = [2, 0.5, 4, 1, 0.1]
    metrics = out.metrics
    k3 = sum(r - 1 - math.log(r) for r in ratios) / 5
    assert metrics["k3_kl"] == pytest.approx(k3)
    assert metrics["chi2_token"] == pytest.approx(sum(r * r for r in ratios) / 5 - 1)
    assert metrics["chi2_seq"] == pytest.approx((4**2 + 0.1**2) / 2 - 1)
    assert metrics["rollout_ppl"] == pytest.approx((math.exp(2) + math.exp(1.5)) / 2)
    geometric = [4 ** (1 / 3), 0.1 ** (1 / 2)]
    assert metrics["ppl_ratio"] == pytest.approx(sum(1 / x for x in geometric) / 2)
    applied = [2, 0.5, 2.5, 1, 0.1]
    size = sum(applied) ** 2 / sum(w * w for w in applied) / 5
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(size)
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)
    assert (metrics["rollout_is_max"], metrics["rollout_is_min"]) == (2.5, pytest.approx(0.1))


def test_equal_policies_need_no_correction() -> None:
    out = correct_rollout(
        ROLLOUT,
        ROLLOUT,
        MASK,
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        rollout_rs=",".join(CRITERIA),
        rollout_rs_threshold=1.0,
    )
    assert out.weights is not None
    assert torch.equal(out.weights.float(), MASK)
    assert torch.equal(out.response_mask, MASK)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff"):
        assert out.metrics[name] == 0, name
    assert out.metrics["ppl_ratio"] == out.metrics["rollout_is_eff_sample_size"] == 1


def test_extremes_and_empty_batches_stay_finite() -> None:
    far = torch.full((1, 3), 500.0)
    for old, mask in ((far, torch.ones(1, 3)), (-far, torch.ones(1, 3)), (far, torch.zeros(1, 3))):
        for level in ("token", "sequence"):
            out = correct_rollout(
                old,
                torch.zeros(1, 3),
                mask,
                rollout_is=level,
                rollout_is_batch_normalize=True,
                rollout_rs="seq_mean_k3",
                rollout_rs_threshold=0.1,
            )
            assert out.weights is not None
            assert out.weights.isfinite().all()
            finite = {k: v for k, v in out.metrics.items() if "ppl" not in k}
            assert all(math.isfinite(v) for v in finite.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is='tokens' is unknown"),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, "low ≤ high"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "one number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "a"}, "one number above 0"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "'token_k4' is not a criterion"),
        ({"rollout_rs": ",", "rollout_rs_threshold": 1}, "is not a criterion"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1_2"}, "one number above 0"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_1"}, "low ≤ high"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "must be 1 or more"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "2 entries for 1 criteria"),
        ({"rollout_rs_threshold": 1}, "has no effect without rollout_rs"),
    ],
)
def test_wrong_settings_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        correct_rollout(OLD, ROLLOUT, MASK, **options)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(DataError, match=r"rollout_log_probs has shape \[2, 2\]"):
        correct_rollout(OLD, ROLLOUT[:, :2], MASK)


def test_one_threshold_serves_all_criteria() -> None:
    first, second = parse_criteria("token_k1, seq_max_k3", "2")
    assert (first.low, first.high) == (pytest.approx(-math.log(2)), pytest.approx(math.log(2)))
    assert (second.level, second.kind) == ("seq_max", "k3")
    assert (second.low, second.high) == (-math.inf, 2.0)
