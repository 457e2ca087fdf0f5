"""The episodes of a step that is being rolled out, in a file beside the checkpoints.

A run that is killed goes back to its newest checkpoint; the step after it goes on from this file,
if it is that step's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
import safetensors.torch
import torch

from engine.agents.partial_episodes import PartialEpisodes
from engine.batch import Batch
from engine.checkpoint.state_dict import extract_tensors, insert_tensors, safetensors_bytes
from engine.errors import EngineError
from engine.storage.folder import Folder

log = logging.getLogger(__name__)

FOLDER = "episodes"  # below the folder of checkpoints
_VALUES = "values"

Groups = Mapping[int, PartialEpisodes]  # by key of their prompt


class SavedRollout:
    """One rank's file, e.g. "rollout-00000-of-00001.safetensors"."""

    def __init__(
        self, folder: str, stem: str, settings: str, every_s: float, before: str = ""
    ) -> None:
        """Save every `every_s` seconds below `folder`; go on from there, or from `before`.

        `settings` stands for all that a rollout depends on, but for what `identity` has.
        """
        self._folder, self._name = Folder(f"{folder}/{FOLDER}"), f"{stem}.safetensors"
        self._sources = [self._folder, *([Folder(f"{before}/{FOLDER}")] if before else [])]
        self._settings, self._every_s = settings, every_s
        self._first, self._saved = True, 0.0
        self._written = False

    def identity(self, prompts: Batch, version: int, seed: int, n: int) -> str:
        """What a rollout is: these prompts, under this version's weights, with this noise."""
        ids = [[int(token) for token in row] for row in prompts.columns["prompt_ids"]]
        facts = [self._settings, version, seed, n, prompts["group_ids"].tolist(), ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def begin(self, identity: str) -> Groups:
        """What was saved of a rollout that begins now; later ones than the first have nothing.

        A run that has resumed has the weights of its checkpoint then, bit for bit.
        """
        first, self._first, self._saved = self._first, False, time.monotonic()
        for source in self._sources if first else ():
            try:
                found = self._read(source, identity)
            except (EngineError, ValueError, KeyError, safetensors.SafetensorError) as error:
                log.warning("the episodes in %s are begun again: %s", source, error)
                continue
            if found:
                count = sum(len(group.episodes) for group in found.values())
                log.info("%d episodes go on from %s", count, source)
                return found
        return {}

    def _read(self, source: Folder, identity: str) -> Groups:
        """What a folder has of this rollout."""
        if self._name not in source.names():
            return {}
        self._written |= source is self._folder
        tensors = safetensors.torch.load(source.read(self._name))
        told = json.loads(tensors.pop(_VALUES).numpy().tobytes())
        if told["identity"] != identity:
            return {}
        groups = insert_tensors(told["groups"], {"groups": tensors})
        return {int(key): PartialEpisodes.from_tree(tree) for key, tree in groups.items()}

    def save(self, identity: str, groups: Callable[[], Groups]) -> None:
        """Save `groups`, if it is time for it; a failure is logged, and the rollout goes on."""
        if time.monotonic() - self._saved < self._every_s:
            return
        trees = {str(key): group.tree() for key, group in groups().items()}
        try:
            values, parts = extract_tensors({"groups": trees})
            told = json.dumps({"identity": identity, "groups": values["groups"]}).encode()
            whole = torch.from_numpy(np.frombuffer(told, np.uint8).copy())
            tensors = parts.get("groups", {}) | {_VALUES: whole}
            self._folder.create()
            self._folder.write(self._name, safetensors_bytes(tensors, {}))
            self._written = True
        except EngineError as error:
            log.warning("the episodes of this step are not saved: %s", error)
        self._saved = time.monotonic()

    def end(self) -> None:
        """The rollout is whole: remove its file."""
        if not self._written:
            return
        self._written = False
        try:
            self._folder.remove_file(self._name)
        except EngineError as error:
            log.warning("episodes of a step that is over stay in %s: %s", self._folder, error)
