"""Load a tagged folder in a vLLM server's workers, completely or not at all.

The `reload_weights` of vLLM 0.32 is not enough. A folder that it fails on leaves parameters without
storage, and the next request ends the server; so everything is checked before anything is touched.
On CPU it leaves a tied head as it was, packed from the old embedding; so the head is packed again.
An MoE model's experts, which a CPU packs too, would be loaded wrong: they are computed unpacked.
vLLM imports this module before it makes its model.
"""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from engine.rollout.server.weights import checksum, shapes
from engine.rollout.vllm.patches import experts_unpacked

_for_good = experts_unpacked()  # a name, as a collected one would undo itself
_for_good.__enter__()


class WeightReceiver:
    """Methods for a vLLM worker, by `--worker-extension-cls`."""

    _hybridflyte_shapes: dict[str, tuple[int, ...]] | None = None
    _hybridflyte_serves = ""

    def hybridflyte_tag(self) -> dict[str, str]:
        """Return the tag of the folder that was loaded last, empty for none."""
        return {"tag": self._hybridflyte_serves}

    def hybridflyte_load(self, folder: str) -> dict[str, str]:
        """Serve the weights in `folder`; `problem` says why they were not even touched."""
        worker: Any = self
        path = Path(folder)
        try:
            problem = self._hybridflyte_problem(path, worker.model_config.model)
        except (OSError, SafetensorError) as error:
            problem = f"it can't be read here: {error}"
        if problem:
            return {"problem": problem}
        self._hybridflyte_serves = ""
        worker.reload_weights(weights_path=folder)
        head = getattr(worker.model_runner.get_model(), "lm_head", None)
        if (method := getattr(head, "quant_method", None)) is not None:
            method.process_weights_after_loading(head)
        for cache in worker.model_runner.kv_caches:
            cache.zero_()  # a NaN in a free block would outlast its weights: 0 times NaN is NaN
        self._hybridflyte_serves = path.name
        return {"tag": path.name}

    def _hybridflyte_problem(self, path: Path, served: str) -> str:
        if not path.is_dir():
            return (
                "there is no such folder on the server's machine; share rollout.server.weights_dir"
            )
        file_shapes = shapes(path)
        if self._hybridflyte_shapes is None and Path(served).is_dir():
            self._hybridflyte_shapes = shapes(Path(served))
        expected = self._hybridflyte_shapes or file_shapes
        names = {name for name, _ in expected.items() ^ file_shapes.items()}
        wrong = sorted(name for name in names if not name.startswith("lm_head."))
        if wrong:
            return (
                f"{len(wrong)} tensors differ in name or shape from the served model's, {wrong[0]} "
                f"for one: {file_shapes.get(wrong[0])} against {expected.get(wrong[0])}"
            )
        if not path.name.endswith(sum_ := checksum(path)):
            return f"its weights have the checksum {sum_}: the files are torn or were changed"
        self._hybridflyte_shapes = expected
        return ""
