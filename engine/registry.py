"""The one registry type of every extension point, and the import of users' modules.

Each room has a registry beside what it registers. An entry is registered by a decorator and
declares its options. The modules with this project's entries are imported when a name is looked up;
users' by the configuration's `plugins`, or by a name such as `package.module:attribute`.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

from engine.errors import ConfigError

T = TypeVar("T")


class Options(dict[str, object]):
    """The options that an entry declares, with their defaults: keyword-only parameters.

    >>> def clip(x, *, low: float = 0.0, high: float = 1.0): ...
    >>> Options("loss 'clip'", clip).parse({"low": "0.5"}, "loss.options")
    {'low': 0.5}
    """

    def __init__(self, owner: str, *functions: Callable[..., object]) -> None:
        """`owner` is the entry in error messages; of several functions all options count."""
        super().__init__({k: v for each in functions for k, v in keyword_defaults(each).items()})
        self._owner, self._functions = owner, functions

    def require_known(self, options: Iterable[str], section: str = "") -> None:
        """Raise ConfigError for the first of `options` that is no option; `section` has them."""
        for option in options:
            if option not in self:
                what = f"{section}.{option}: " if section else ""
                raise ConfigError(
                    f"{what}{self._owner} doesn't read {option!r}{_similar(option, self)}; "
                    f"remove it (it reads {', '.join(sorted(self)) or 'no options'})"
                )

    def parse(self, options: Mapping[str, object], section: str) -> dict[str, object]:
        """Return the options of a configuration's `section`, in the types that are declared.

        Raises ConfigError for an unknown option and for a value of another type.
        """
        self.require_known(options, section)
        types: dict[str, object] = {}
        for function in self._functions if options else ():
            # A name that only a type checker sees: values stay as they are.
            with suppress(NameError, TypeError, AttributeError):
                types |= get_type_hints(
                    function.__init__ if inspect.isclass(function) else function
                )
        return {k: _converted(v, types.get(k), f"{section}.{k}") for k, v in options.items()}


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    target: object  # the decorated function or class
    options: Options

    def stands_for(self, target: object) -> bool:
        return target is self.target or target is self.value


class Registry(Generic[T]):
    """Entries of one kind, by name.

    >>> colours: Registry[str] = Registry("colour", "plot.colour")
    >>> colours.add("red", "#f00")
    >>> colours.get("red"), colours.names()
    ('#f00', ('red',))
    """

    def __init__(
        self, kind: str, setting: str, modules: Sequence[str] = (), decorator: str = ""
    ) -> None:
        """Make an empty registry of one `kind`, e.g. "reward function".

        `setting` is the configuration's field that names an entry, e.g. "rollout.engine".
        `modules` have entries; they are imported one by one until a name is found. `decorator` is
        what users put on a function of theirs, e.g. "@register_reward(name)".
        """
        self.kind, self.setting = kind, setting
        self._decorator = decorator
        self._entries: dict[str, _Entry[T]] = {}
        self._aliases: dict[str, str] = {}
        self._unread = list(modules)

    def add(
        self,
        name: str,
        value: T,
        target: object = None,
        *,
        aliases: Iterable[str] = (),
        options: Options | None = None,
    ) -> None:
        """Register `value`; raise ConfigError when the name is taken, but by the same target.

        `target` is the function or class that stands at a `package.module:attribute` path, and
        declares the options unless `options` are given.
        """
        if ":" in name:
            raise ConfigError(f"{self.kind} {name!r}: a name has no ':'; choose another name")
        target = value if target is None else target
        for taken in (name, *aliases):
            entry = self._entries.get(self._aliases.get(taken, taken))
            if entry is not None and origin(entry.target) != origin(target):
                raise ConfigError(
                    f"{self.kind} {taken!r} is already registered by {origin(entry.target)}; "
                    f"choose another name for {origin(target)}"
                )
        if options is None:
            functions = [target] if callable(target) else []
            options = Options(f"{self.kind} {name!r}", *functions)
        self._entries[name] = _Entry(value, target, options)
        self._aliases |= dict.fromkeys(aliases, name)

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator: register a function or class as it is."""

        def decorate(value: T) -> T:
            self.add(name, value, aliases=aliases)
            return value

        return decorate

    def get(self, name: str) -> T:
        """Return the entry with this name, alias or `package.module:attribute` path."""
        return self._find(name).value

    def options(self, name: str) -> Options:
        """Return the options that an entry declares."""
        return self._find(name).options

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted, without aliases."""
        while self._unread:
            self._import_first()
        return tuple(sorted(self._entries))

    def values(self) -> tuple[T, ...]:
        """Return all entries, in the order of their names."""
        return tuple(self._entries[name].value for name in self.names())

    def registered(self, target: object) -> T | None:
        """Return the entry of a function or class; None where it isn't registered."""
        return next((e.value for e in self._entries.values() if e.stands_for(target)), None)

    def module(self, name: str) -> str:
        """Return the module of an entry, e.g. "my_module"; one at a path isn't imported."""
        if ":" in name:
            return name.partition(":")[0]
        return str(getattr(self._find(name).target, "__module__", ""))

    def load(self, path: str) -> object:
        """Import what stands at `package.module:attribute`, registered or not."""
        module_name, _, attribute = path.partition(":")
        module = _import_module(module_name, f"{self.setting}={path!r}")
        try:
            return getattr(module, attribute)
        except AttributeError:
            raise ConfigError(
                f"{self.setting}={path!r}: module {module_name!r} has no {attribute!r}"
            ) from None

    def _find(self, name: str) -> _Entry[T]:
        if ":" in name:
            target = self.load(name)
            for entry in self._entries.values():
                if entry.stands_for(target):
                    return entry
            how = f"; put {self._decorator} on it" if self._decorator else ""
            raise ConfigError(f"{self.setting}={name!r} is not registered as a {self.kind}{how}")
        # No more modules are imported than it takes; the one of the same name comes first.
        self._unread.sort(key=lambda module: module.rpartition(".")[2] != name)
        while (known := self._entries.get(self._aliases.get(name, name))) is None:
            if not self._unread:
                raise ConfigError(
                    f"{self.setting}={name!r} is unknown{_similar(name, self._entries)}; choose "
                    f"one of {', '.join(self.names())}, or give your own as package.module:name"
                )
            self._import_first()
        return known

    def _import_first(self) -> None:
        module = self._unread[0]
        importlib.import_module(module)  # one that fails is tried again at the next look-up
        self._unread = [name for name in self._unread if name != module]


def keyword_defaults(function: Callable[..., object]) -> dict[str, object]:
    """Return the keyword-only parameters of `function` that have defaults, with the defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty]
    return {p.name: p.default for p in named}


def origin(target: object) -> str:
    """Say where a function or class is defined, e.g. "my_module:my_reward"."""
    name = getattr(target, "__qualname__", None) or repr(target)
    return f"{getattr(target, '__module__', '?')}:{name}"


def _converted(value: object, kind: Any, where: str) -> object:
    if kind is None:
        return value
    if isinstance(value, bool) and kind in (int, float):
        raise ConfigError(f"{where}={value}: give a number, not true or false")
    from pydantic import TypeAdapter, ValidationError  # which a reward's process starts without

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where}={value!r}: {error.errors()[0]['msg']}") from None


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def import_plugins(modules: Iterable[str]) -> None:
    """Import each module, once a process; raise ConfigError for one that can't be imported."""
    for name in modules:
        _import_module(name, "plugins")


def _import_module(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may fail in any way
        raise ConfigError(
            f"{setting}: module {name!r} can't be imported ({type(error).__name__}: {error}); it "
            "must be on the Python path of every process and import cleanly"
        ) from error


def load_function(path: str, name: str, setting: str) -> Callable[..., Any]:
    """Return a function of a user's Python file, which is imported once a process.

    A relative path is looked for in the working directory and on Python's path, where Ray puts a
    job's files. Raises ConfigError, with the `setting` that names the file, where there is no such
    file or function and where the file can't be imported.
    """
    places = (Path(base) / Path(path).expanduser() for base in ("", *sys.path))
    file = next(filter(Path.is_file, places), None)
    if file is None:
        raise ConfigError(
            f"{setting}: {path} does not exist here; each machine of the cluster needs it, or a "
            "job's working directory has to hold it"
        )
    function = getattr(_import_file(file.resolve(), setting), name, None)
    if not callable(function):
        raise ConfigError(f"{setting}: {path} has no function {name!r}; name one of its functions")
    return function


def _import_file(file: Path, setting: str) -> ModuleType:
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what it imports from beside it
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(file.stem)
    if spec is not None and spec.origin == str(file):  # a plugin may be the same module
        return _import_module(file.stem, setting)
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if (known := sys.modules.get(name)) is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {file} is not a Python file; give one that ends in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may fail in any way
        del sys.modules[name]
        raise ConfigError(
            f"{setting}: {file} can't be imported ({type(error).__name__}: {error}); correct it"
        ) from error
    return module
