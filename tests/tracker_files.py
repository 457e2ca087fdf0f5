"""What trackers have written, read back."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def tensorboard_points(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def wandb_points(file: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values in a run's file: LevelDB's log format, with W&B's protobufs as records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = file.read_bytes(), 7, b""  # a header of 7 bytes
    points = []
    while place < len(content):
        left = 32768 - place % 32768  # of this block; too little for a record is padding
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", content, place + 4)  # behind a checksum
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of it, or its last part
            record = Record.FromString(whole)
            whole = b""
            items = {"".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            if name in items:
                points.append((record.history.step.num, json.loads(items[name])))
    return points
