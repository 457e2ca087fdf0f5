"""`python -m engine.config`: all settings as a page, or as a JSON schema for editors."""

from __future__ import annotations

import argparse
import json

from engine.config.pipeline import PipelineConfig
from engine.config.text import markdown


def main() -> None:
    """Print the settings as a page, or as a JSON schema."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.config", description="Print every setting, its default and meaning."
    )
    parser.add_argument(
        "--json-schema", action="store_true", help="print the JSON schema, for editors"
    )
    if parser.parse_args().json_schema:
        print(json.dumps(PipelineConfig.model_json_schema(), indent=1))
    else:
        print(markdown(), end="")


if __name__ == "__main__":
    main()
