"""The moment of a kick-off: in UTC, and not still to come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pandas as pd
import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import DateTimeType

from engine.config import RetrainConfig
from engine.data.decontamination import NewRows
from engine.data.incremental_data import NewFiles
from engine.errors import ConfigError
from engine.stages.new_data import check_kickoff, skip_reason
from engine.tracking.model_versions import ModelVersion

NOW = datetime(2026, 11, 20, 2, tzinfo=UTC)


def test_a_kick_off_that_has_passed_or_is_as_good_as_now_starts() -> None:
    for early in (timedelta(days=-9), timedelta(0), timedelta(minutes=9)):
        check_kickoff(NOW + early, NOW)
        check_kickoff((NOW + early).replace(tzinfo=None), NOW)


def test_one_that_is_still_to_come_is_refused_in_utc() -> None:
    tokyo = timezone(timedelta(hours=9))
    for at in (NOW + timedelta(minutes=11), (NOW + timedelta(minutes=11)).replace(tzinfo=None),
               (NOW + timedelta(minutes=11)).astimezone(tokyo)):  # fmt: skip
        with pytest.raises(ConfigError, match="2026-11-20T02:11:00 is still to come: it is now"):
            check_kickoff(at, NOW)


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_pyflyte_s_now_east_of_utc_is_refused(tokyo: None) -> None:
    context = FlyteContextManager.current_context()
    typed = DateTimeType().convert("now", None, None)
    literal = TypeEngine.to_literal(context, typed, datetime, TypeEngine.to_literal_type(datetime))
    given = TypeEngine.to_python_value(context, literal, datetime)
    with pytest.raises(ConfigError, match=r'such as --kickoff "\$\(date -u'):
        check_kickoff(given, datetime.now(UTC))


@pytest.mark.parametrize(
    ("waiting", "end"),
    [
        (0, "became champion"),
        (1, "became champion; 1 file written after the kick-off waits for a later one"),
        (3, "became champion; 3 files written after the kick-off wait for a later one"),
    ],
)
def test_files_after_the_kick_off_are_in_the_reason(waiting: int, end: str) -> None:
    champion = ModelVersion("policy", "2", "ab", "s3://mlflow", {}, ("champion",))
    files = NewFiles("/arrivals", waiting=waiting)
    reason = skip_reason(files, NewRows(pd.DataFrame(), 0), RetrainConfig(), champion)
    assert reason == f"nothing new in /arrivals since version 2 {end}"
