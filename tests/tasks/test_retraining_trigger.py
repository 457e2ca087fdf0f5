"""The moment of a kick-off: in UTC, and not still to come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import DateTimeType

from engine.errors import ConfigError
from tasks.retraining_trigger import check_kickoff

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
