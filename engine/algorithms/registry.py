"""Named entries with declared options: what estimators, losses and others are registered in.

What lives here: `Registry`, discovery of the files beside a package, and the check of options.
What does not: any formula.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import ConfigError


class Named(Protocol):
    """What a registry holds: something with a name and options."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


E = TypeVar("E", bound=Named)


class Registry(Generic[E]):
    """Entries of one kind, by name.

    >>> Registry("policy loss").names()
    ()
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, E] = {}
        self._aliases: dict[str, str] = {}

    def add(self, entry: E, aliases: Sequence[str] = ()) -> E:
        """Store `entry` under its name; raise ConfigError when the name is taken."""
        for name in (entry.name, *aliases):
            if name in self._entries or name in self._aliases:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered already; choose another name"
                )
        self._entries[entry.name] = entry
        self._aliases |= dict.fromkeys(aliases, entry.name)
        return entry

    def get(self, name: str) -> E:
        """Return the entry `name` (or alias); raise ConfigError that lists the known names."""
        try:
            return self._entries[self._aliases.get(name, name)]
        except KeyError:
            raise ConfigError(
                f"unknown {self.kind} {name!r}{_meant(name, self._entries)}; "
                f"known: {', '.join(self.names())}"
            ) from None

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted, without aliases."""
        return tuple(sorted(self._entries))

    def options(self, name: str) -> dict[str, Any]:
        """The keyword options that `name` reads, with their defaults."""
        return dict(self.get(name).options)

    def check_options(self, name: str, given: Iterable[str]) -> None:
        """Raise ConfigError when `given` names an option that `name` doesn't read."""
        check_options(self.kind, name, self.get(name).options, given)


def check_options(kind: str, name: str, options: Mapping[str, Any], given: Iterable[str]) -> None:
    """Raise ConfigError for the first of `given` that is not among `options`."""
    for option in given:
        if option not in options:
            reads = ", ".join(sorted(options)) or "no options"
            raise ConfigError(
                f"{kind} {name!r} doesn't read {option!r}{_meant(option, options)}; "
                f"remove it ({name} reads: {reads})"
            )


def declared_options(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of `function` that have defaults, with those defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
    }


def import_siblings(package: str, path: Iterable[str]) -> None:
    """Import every public module of a package, so that its entries register themselves."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
