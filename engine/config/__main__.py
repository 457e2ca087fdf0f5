"""Print every setting with its default and meaning: as a page, or as a JSON schema."""

from __future__ import annotations

import argparse
import json

from engine.config.pipeline import PipelineConfig
from engine.config.text import markdown


def main() -> None:
    parser = argparse.ArgumentParser("python -m engine.config", description=__doc__)
    parser.add_argument("--json-schema", action="store_true", help="the schema, for editors")
    if parser.parse_args().json_schema:
        print(json.dumps(PipelineConfig.model_json_schema(), indent=1))
    else:
        print(markdown(), end="")


if __name__ == "__main__":
    main()
