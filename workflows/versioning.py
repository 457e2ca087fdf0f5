"""The version that things are registered under: the git commit and the images' digests.

Two registrations of one version are the same thing. What was edited after the commit is refused,
or marked by a digest of its content.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from engine.errors import ConfigError

# What is registered or goes into an image; notes and tests beside it may differ.
SOURCES = ("engine", "tasks", "workflows", "images", "Dockerfile", "pyproject.toml")
GIT_SECONDS = 30.0
SHORT = 12  # hex digits
_BY_DIGEST = re.compile(r"(?P<name>[^@\s]+)@sha256:(?P<digest>[0-9a-f]{64})")


def version_of(root: Path, images: Mapping[str, str], allow_dirty: bool = False) -> str:
    """Return `<commit>-<images>`, and `-dirty-<content>` after it for edited sources.

    `images` are references by digest, by kind. Raises ConfigError where one is not, outside a git
    checkout, and for edited sources unless they are allowed.
    """
    image = images_digest(images)
    commit = _git(root, "rev-parse", "HEAD").strip()[:SHORT]
    edited = edits(root)
    if not edited:
        return f"{commit}-{image}"
    if not allow_dirty:
        shown = ", ".join(edited[:3]) + (f" and {len(edited) - 3} more" if edited[3:] else "")
        raise ConfigError(
            f"the sources differ from commit {commit}: {shown}; commit them, or register a marked "
            "version with --allow-dirty"
        )
    return f"{commit}-{image}-dirty-{content_digest(root, edited)[:8]}"


def images_digest(images: Mapping[str, str]) -> str:
    """Twelve hex digits: those of the one image, or of a hash over several."""
    digests = {kind: image_digest(kind, reference) for kind, reference in images.items()}
    if len(set(digests.values())) == 1:
        return next(iter(digests.values()))[:SHORT]
    lines = "".join(f"{kind}={digests[kind]}\n" for kind in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()[:SHORT]


def image_digest(kind: str, reference: str) -> str:
    """The SHA-256 (hex) in a reference; ConfigError for one by tag, which may move."""
    match = _BY_DIGEST.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"image {kind}={reference!r} is not by digest, and a tag may point elsewhere tomorrow; "
            "give NAME@sha256:…, which `docker buildx imagetools inspect NAME:TAG` prints"
        )
    return match["digest"]


def edits(root: Path) -> list[str]:
    """Paths below `SOURCES` that differ from the commit, new ones included."""
    listed = _git(root, "status", "--porcelain", "-z", "--no-renames", "-uall", "--", *SOURCES)
    return sorted(entry[3:] for entry in listed.split("\0") if entry)


def content_digest(root: Path, paths: list[str]) -> str:
    """SHA-256 (hex) over the paths and their present bytes; a deleted file has none."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        file = root / path
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "deleted"
        digest.update(f"{path}\0{content}\n".encode())
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git does not answer ({error}); the version needs it") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"{root} has no git commit to name the version by ({error.stderr.strip()}); register "
            "from a checkout"
        ) from error
    return done.stdout
