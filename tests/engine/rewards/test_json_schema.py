import pytest

from engine.errors import RewardError
from engine.rewards.answers import json_schema, json_text

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', 1.0),
        ('So:\n```json\n{"a": 1}\n```\nDone.', 1.0),
        ('```\n{"a": "x"}\n``` or ```\n{"a": 2}\n```', 1.0),
        ('{"a": "x"}', 0.0),
        ("{}", 0.0),
        ("not JSON", 0.0),
        ("NaN", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a": ' + "9" * 1_000_000 + "}", 0.0),
    ],
)
def test_completions_that_keep_a_schema(text: str, value: float) -> None:
    assert json_schema([""], [text], ground_truth=[None], schema=SCHEMA) == [value]


def test_the_schema_may_be_the_rows_own() -> None:
    assert json_schema([""], ["3"], ground_truth=['{"type": "integer"}']) == [1.0]
    with pytest.raises(RewardError, match="the JSON schema is none"):
        json_schema([""], ["3"], ground_truth=['{"type": "intger"}'])
    assert json_text("``` 1 ```") == "1"


def test_a_reference_reaches_nothing_outside() -> None:
    with pytest.raises(Exception, match=r"example\.invalid"):
        json_schema([""], ["3"], ground_truth=[None], schema={"$ref": "http://example.invalid/s"})
