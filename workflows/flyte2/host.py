"""Flyte 2 as a stage sees it: its host, errors, inputs and outputs, caching and signals."""

import contextlib
import contextvars
import hashlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import flyte
import flyte.errors
import flyte.report
import pandas as pd
from flyte.io import Dir, File
from flyte.types import TypeEngine, TypeTransformer
from flyteidl2.core.literals_pb2 import Literal, Primitive, Scalar
from flyteidl2.core.types_pb2 import LiteralType, SimpleType

from engine import errors
from engine.config import PipelineConfig, parse_config
from engine.config.text import read_settings
from engine.console import end_process, quiet, say
from engine.data.contract import EVALUATION_ROWS, check
from engine.redaction import redact_causes
from engine.stages import pods, stage
from engine.stages.stage import Artifact, CheckpointPaths, Host, is_dry_run, library_versions
from engine.storage.artifacts import read_manifest
from engine.storage.digests import sources_digest

quiet()

PUBLISH_SECONDS = 60.0  # between two uploads of a live report


class Flyte2Host(Host):
    """The running task of Flyte 2, on a cluster or here."""

    def __init__(self) -> None:
        context = flyte.ctx()
        self.execution = (context.action.run_name or "") if context.is_in_cluster() else ""
        self.dry_run = is_dry_run()

    def show(self, tab: str, page: str) -> None:
        flyte.report.get_tab(tab).replace(page)

    def live_page(self, tab: str) -> Callable[[str], None]:
        report, context, due = flyte.report.get_tab(tab), contextvars.copy_context(), 0.0

        def replace(page: str) -> None:
            nonlocal due
            report.replace(page)
            if self.execution and time.monotonic() >= due:
                context.copy().run(flyte.report.flush)
                due = time.monotonic() + PUBLISH_SECONDS

        return replace

    def publish_pages(self) -> None:
        flyte.report.flush()

    def checkpoint_paths(self) -> CheckpointPaths | None:
        # Flyte's `Checkpoint` would copy one local folder at a time; the engine writes there
        # itself, sharded and in the background. Locally a run's paths are its own.
        paths = flyte.ctx().checkpoint_paths if self.execution else None
        if paths is None or not paths.checkpoint_path:
            return None
        previous = (paths.prev_checkpoint_path or "").strip('"')
        return CheckpointPaths(paths.checkpoint_path, previous or None)


# Errors. Flyte 2 tries a task again unless its error says otherwise.


@contextlib.contextmanager
def flyte_host() -> Iterator[None]:
    """Run the block's stages as this task, which fails with an engine error's message alone."""
    where = Flyte2Host()
    try:
        with stage.hosted(where):
            yield
    except errors.EngineError as error:
        redact_causes(error)
        if where.execution and isinstance(error, pods.RETRYABLE):
            raise
        raise flyte.errors.NonRecoverableError(str(error), type(error).__name__) from error
    except flyte.errors.BaseRuntimeError:
        raise
    except Exception as error:  # a fault in the code, which another attempt would meet again
        text = f"{type(error).__name__}: {error}"
        raise flyte.errors.NonRecoverableError(text, type(error).__name__) from error


def _unexpected(record: logging.LogRecord) -> bool:
    """Keep from a terminal the tracebacks of failures that end in a sentence."""
    if flyte.ctx().is_in_cluster():
        return True
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, flyte.errors.BaseRuntimeError):
        return not isinstance(error.__cause__, errors.EngineError | None)
    return "non-recoverable error" not in record.getMessage()


flyte.system_logger.addFilter(_unexpected)


# Inputs and outputs.


class Settings(str):
    """The pipeline's settings: a file, preset:NAME or JSON text; for a task JSON text."""

    def parse(self) -> PipelineConfig:
        """Return them; ConfigError names what is wrong."""
        return parse_config(read_settings(self))


class _SettingsTransformer(TypeTransformer[Settings]):
    """Reads and checks settings where a run is started, as a pod does not have the file."""

    def __init__(self) -> None:
        super().__init__("settings", Settings, enable_type_assertions=False)

    def get_literal_type(self, t: type[Settings]) -> LiteralType:
        return LiteralType(simple=SimpleType.STRING)

    async def to_literal(
        self, python_val: str, python_type: type[Settings], expected: LiteralType
    ) -> Literal:
        values = Settings(python_val or "{}")
        values.parse()
        text = json.dumps(read_settings(values), sort_keys=True)
        return Literal(scalar=Scalar(primitive=Primitive(string_value=text)))

    async def to_python_value(self, lv: Literal, expected_python_type: type[Settings]) -> Settings:
        return Settings(lv.scalar.primitive.string_value)


TypeEngine.register(_SettingsTransformer())


def run_body(body: Callable[..., Any], **inputs: object) -> Any:
    """Call a stage's body with a task's inputs, by name."""
    with flyte_host():
        return body(**{name: _as_stages_take_it(value) for name, value in inputs.items()})


def _as_stages_take_it(value: object) -> Any:
    if isinstance(value, Dir):
        return Artifact(value.path)
    if isinstance(value, Settings):
        return value.parse()
    return tables(value) if isinstance(value, list) else value


def folder(body: Callable[..., Artifact], **inputs: Any) -> Dir:
    """Call a stage's body; return its artifact, known by its content.

    Flyte uploads it only from a pod, where no shared store has it.
    """
    made = run_body(body, **inputs)
    digest = read_manifest(made.local()).digest
    if flyte.ctx().is_in_cluster() and "://" not in made.uri:
        return Dir.from_local_sync(made.uri, dir_cache_key=digest)
    return Dir(path=made.uri, hash=digest)


def file(body: Callable[..., Path], **inputs: Any) -> File:
    """Call a stage's body; return its file, uploaded from a pod."""
    path = str(run_body(body, **inputs))
    return File.from_local_sync(path) if flyte.ctx().is_in_cluster() else File(path=path)


def tables(files: Sequence[File]) -> Iterator[pd.DataFrame]:
    """Yield the rows of `evaluate_part`; DataError where a table breaks the contract."""
    for number, part in enumerate(files):
        frame = pd.read_parquet(part.download_sync() if "://" in part.path else part.path)
        check(frame, EVALUATION_ROWS, f"part {number + 1} of the evaluation")
        yield frame


def is_gone(made: object) -> bool:
    """Tell whether a cached result is a folder of this machine that was deleted."""
    return isinstance(made, Dir) and "://" not in made.path and not Path(made.path).exists()


# Caching.


class SourcesPolicy:
    """Cache version: our sources, these wrappers of them, and the libraries of the image."""

    def get_version(self, salt: str, params: object) -> str:
        wrappers = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        parts = (salt, sources_digest(), library_versions(), *map(bytes.hex, wrappers))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cache(*salt: str, overwrite: bool = False) -> flyte.Cache:
    """Return the cache of stages: by their inputs' content (without the run), sources and `salt`.

    The salt has what Flyte's key has not: the image, and the profile.
    """
    return flyte.Cache(
        "override" if overwrite else "auto",
        policies=[SourcesPolicy()],
        ignored_inputs=("run",),
        serialize=True,
        salt="\0".join(salt),
    )


# Signals. Flyte runs our code in threads, and Python delivers signals to the main one alone.


on_interrupt: list[Callable[[], None]] = []  # records the end of the local run, if there is one


def _on_signal(number: int, frame: FrameType | None) -> None:
    """End the command; on SIGTERM training that can save a step does so first."""
    resume = sys.modules.get("engine.trainers.resume")
    if number == signal.SIGTERM and resume is not None and resume.announce_preemption():
        return
    signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
    for record in on_interrupt:
        say("interrupted; what is done is cached, run again to continue")
        record()
    end_process(128 + number)


if threading.current_thread() is threading.main_thread():
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, _on_signal)
