"""Keys and signatures of manifests."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from lineage_store import edit, make, parent

from engine.errors import ConfigError, StorageError
from engine.storage import signatures
from engine.storage.artifacts import read_manifest
from engine.storage.signatures import KEYS_VARIABLE, SIGNING_VARIABLE


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDFLYTE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(SIGNING_VARIABLE, raising=False)
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The public key of those that this process signs with."""
    public = signatures.new_key(tmp_path / "key.pem")
    monkeypatch.setenv(SIGNING_VARIABLE, str(tmp_path / "key.pem"))
    return public


def test_a_new_key_is_its_owners_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    signatures.new_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    with pytest.raises(StorageError, match="name a file that is not there"):
        signatures.new_key(path)
    assert path.read_bytes() == before


def test_what_is_published_is_signed_by_the_key_in_a_file_or_in_the_variable(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(make("sft", "one"))
    assert manifest.signed is not None
    assert manifest.signed.key == key
    assert manifest.signature_fault({key}) == ""
    monkeypatch.setenv(SIGNING_VARIABLE, (tmp_path / "key.pem").read_text())
    assert read_manifest(make("sft", "two")).signature_fault({key}) == ""
    monkeypatch.delenv(SIGNING_VARIABLE)
    assert read_manifest(make("sft", "three")).signed is None


EDITS = {
    "metrics": {"metrics": {"reward": 1.0}},
    "config": {"config": {"text": "other"}},
    "parents": {"parents": []},
    "code": {"code_version": "0" * 40},
    "content": {"digest": "0" * 64},
    "time": {"created_at": "2020-01-01T00:00:00Z"},
}


@pytest.mark.parametrize("words", EDITS)
def test_an_edit_of_any_word_breaks_the_signature(key: str, words: str) -> None:
    path = make("rl", "model", parent("sft", make("sft", "start")), reward=float("inf"))
    assert read_manifest(path).signature_fault({key}) == ""
    edit(path, **EDITS[words])
    assert "is not as the key" in read_manifest(path).signature_fault(None)


def test_whose_signature_counts(key: str, tmp_path: Path) -> None:
    manifest = read_manifest(make("sft", "one"))
    assert manifest.signature_fault(None) == ""
    other = signatures.new_key(tmp_path / "other.pem")
    assert "which does not count here" in manifest.signature_fault({other})
    forged = manifest.signed.model_copy(update={"key": other})  # type: ignore[union-attr]
    assert "is not as the key" in manifest.model_copy(update={"signed": forged}).signature_fault(
        {other}
    )


def test_an_unsigned_artifact_does_not_stand_for_a_signed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = make("sft", "one")
    key = signatures.new_key(tmp_path / "key.pem")
    monkeypatch.setenv(SIGNING_VARIABLE, str(tmp_path / "key.pem"))
    signed = make("sft", "one")
    assert read_manifest(signed).signature_fault({key}) == ""
    assert read_manifest(unsigned).signed is None, "its children refer to it as it is"
    assert make("sft", "one") == signed
    monkeypatch.delenv(SIGNING_VARIABLE)
    assert make("sft", "one") == unsigned


def rsa_key(path: Path) -> str:
    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(pem)
    return str(path)


BAD_KEYS: dict[str, tuple[Callable[[Path], str], str]] = {
    "no file": (lambda path: str(path), "holds no private key that can be read .FileNotFoundErr"),
    "no key": (lambda path: str(path.write_text("words") and path), "holds no private key"),
    "half a PEM": (lambda path: "-----BEGIN PRIVATE KEY-----hunter2", "holds no private key"),
    "RSA": (rsa_key, "not Ed25519"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_a_bad_key_is_refused_and_not_shown(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, said = BAD_KEYS[case]
    monkeypatch.setenv(SIGNING_VARIABLE, setting(tmp_path / "bad.pem"))
    with pytest.raises(ConfigError, match=said) as refused:
        make("sft", "one")
    assert "hunter2" not in str(refused.value)


def test_the_keys_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no public key counts"):
        signatures.trusted_keys()
    monkeypatch.setenv(KEYS_VARIABLE, f"{'a' * 64}, {'B' * 64}")
    assert signatures.trusted_keys(["c" * 64]) == {"a" * 64, "b" * 64, "c" * 64}
    with pytest.raises(ConfigError, match=r"'abc' in lineage.public_keys or .* is no public key"):
        signatures.trusted_keys(["abc"])
