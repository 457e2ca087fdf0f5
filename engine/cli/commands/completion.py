"""`python -m engine.completion`: completion of all `python -m engine.…` commands in a shell.

The script has every word in it, so that a TAB starts no Python.
"""

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine
from engine.cli import forms
from engine.config.text import PRESET, PRESETS, Setting, sections
from engine.console import command_line

_ENGINE = Path(engine.__file__).parent
_FORMS = {f"engine.{form.program}": form for form in forms.ALL}
_SCRIPT = """\
# Completion of HybridFlyte's commands, by python -m engine.completion.
_hybridflyte() {{
    local typed=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local module= key= words= values=s/=.*/=/ i
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${{COMP_WORDS[i]}} == -m ]]; then module=${{COMP_WORDS[i+1]}}; break; fi
    done
    if [[ $typed == "=" ]]; then  # bash makes three words of key=value, zsh one
        key=$before= typed=
    elif [[ $before == "=" ]]; then
        key=${{COMP_WORDS[COMP_CWORD-2]}}=
    fi
    if [[ $before == -m ]]; then module=$before; fi
    case $module in
        -m) words="{modules}" ;;
{words}
    esac
    if [[ $key$typed == *=* ]]; then values=; fi  # words have key= as well as key=value
    COMPREPLY=($(compgen -W "$words" -- "$key$typed" | sed "s/^$key//; $values" | uniq))
    if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _hybridflyte python python3
"""


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="python -m engine.completion",
        description="Print a script for bash and zsh that completes commands, options, settings "
        "and their values after `python -m engine.`: write it to a file, and source that in "
        "~/.bashrc, or in ~/.zshrc after `autoload -U compinit bashcompinit; compinit; "
        "bashcompinit`.",
        epilog="exit status: 0; 2 wrong usage",
    ).parse_args(arguments)
    print(script(), end="")
    return 0


def script() -> str:
    words = (f'        {name}) words="{" ".join(_words(name))}" ;;' for name in commands())
    return _SCRIPT.format(modules=" ".join(commands()), words="\n".join(words))


def commands() -> list[str]:
    """Return the modules that `python -m` runs, those under verl's names left out."""
    files = [*(_ENGINE / "cli" / "commands").glob("[a-z]*.py"), *_ENGINE.glob("*/__main__.py")]
    names = (path.parent.name if path.stem == "__main__" else path.stem for path in files)
    return sorted(f"engine.{name}" for name in names)


def _words(module: str) -> Iterator[str]:
    """Yield the options of a command, its subcommands with theirs, and its settings."""
    yield from sorted(set(_options(_parser_of(module))))
    if (form := _FORMS.get(module)) is None:
        return
    yield from (f"{PRESET}{path.stem}" for path in sorted(PRESETS.glob("*.yaml")))
    several = (settings for _, _, settings in sections(form.config))
    choices = {setting.path: _choices(setting) for setting in chain.from_iterable(several)}
    for key in sorted(form.known):
        target = form.find(key)
        values = choices.get(target.paths[0], []) if target is not None else []
        yield from (f"{key}={value}" for value in ("", *values))


def _choices(setting: Setting) -> list[str]:
    if listed := re.search(r"one of (.*)$", setting.about):
        return listed[1].split(", ")
    return ["true", "false"] if setting.default in ("true", "false") else []


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action.choices, dict):  # subcommands
            yield from action.choices
            for inner in action.choices.values():
                yield from _options(inner)


class _ParserMade(BaseException):
    """Ends a command once its parser is made."""


def _parser_of(module: str) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        raise _ParserMade(parser)

    is_room = (_ENGINE / module.rpartition(".")[2]).is_dir()
    program = importlib.import_module(f"{module}.__main__" if is_room else module)
    try:
        with patch.object(argparse.ArgumentParser, "parse_known_args", stop):
            program.main()
    except _ParserMade as made:
        return made.args[0]
    raise AssertionError(f"{module} reads no arguments")


if __name__ == "__main__":
    sys.exit(main())
