"""Print every setting with its default and meaning: as a page, or as a JSON schema."""

import argparse
import json
import sys

from engine.config.pipeline import PipelineConfig
from engine.config.text import PRESETS, markdown
from engine.console import command_line


@command_line()
def main() -> int:
    parser = argparse.ArgumentParser("python -m engine.config", description=__doc__)
    parser.add_argument("--json-schema", action="store_true", help="the schema, for editors")
    if parser.parse_args().json_schema:
        schema = PipelineConfig.model_json_schema()
        about = "The preset whose values the others change"
        names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
        schema["properties"] |= {"preset": {"description": about, "enum": names}}
        print(json.dumps(schema, indent=1))
    else:
        print(markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
