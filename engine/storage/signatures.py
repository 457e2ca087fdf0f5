"""Ed25519 signatures of manifests: who published an artifact, which a store alone can't say.

A process signs with the private key in `$HYBRIDFLYTE_SIGNING_KEY`, a PEM text or the path of a file
with one. Public keys are 64 hex digits; those that count are in `$HYBRIDFLYTE_PUBLIC_KEYS` and in
`lineage.public_keys`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from engine.errors import ConfigError
from engine.storage.filesystem import writing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNING_VARIABLE = "HYBRIDFLYTE_SIGNING_KEY"
KEYS_VARIABLE = "HYBRIDFLYTE_PUBLIC_KEYS"
PUBLIC_KEY = r"^[0-9a-f]{64}$"


class Signature(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(pattern=PUBLIC_KEY, description="Public key, hex")
    value: str = Field(pattern=r"^[0-9a-f]{128}$", description="Signature, hex")

    def holds(self, content: bytes) -> bool:
        """Tell whether the key's owner signed these bytes."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))
            key.verify(bytes.fromhex(self.value), content)
        except (InvalidSignature, ValueError):
            return False
        return True


def sign(content: bytes) -> Signature | None:
    """Sign bytes with this process's key; None without one, ConfigError for one that is none."""
    key = signing_key()
    if key is None:
        return None
    return Signature(key=public_key(key), value=key.sign(content).hex())


def signing_key() -> Ed25519PrivateKey | None:
    """Return the private key of `$HYBRIDFLYTE_SIGNING_KEY`, if it is set; or ConfigError."""
    text = os.environ.get(SIGNING_VARIABLE, "").strip()
    if not text:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        # The key's text must be in no message.
        pem = text.encode() if text.startswith("-----BEGIN") else Path(text).read_bytes()
        key = serialization.load_pem_private_key(pem, password=None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{SIGNING_VARIABLE} holds no private key that can be read ({type(error).__name__}); "
            "set it to the PEM text of an Ed25519 key without a password, or to a file with one "
            "(python -m engine.lineage keygen FILE)"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{SIGNING_VARIABLE} is not Ed25519; python -m engine.lineage keygen FILE makes a key"
        )
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def new_key(path: Path) -> str:
    """Write a new private key to a file that only its owner reads; return the public key (hex).

    Raises StorageError where the file is there already or can't be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    flags, way_out = os.O_WRONLY | os.O_CREAT | os.O_EXCL, "name a file that is not there"
    with writing(path, way_out), open(os.open(path, flags, 0o600), "wb") as file:
        file.write(pem)
    return public_key(key)


def trusted_keys(configured: Iterable[str] = ()) -> frozenset[str]:
    """Return the public keys that count: those of the settings and `$HYBRIDFLYTE_PUBLIC_KEYS`.

    Raises ConfigError for what is no key, and where there is none.
    """
    named = os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()
    keys = frozenset(key.lower() for key in (*configured, *named))
    for key in keys:
        if not re.fullmatch(PUBLIC_KEY, key):
            raise ConfigError(
                f"{key!r} in lineage.public_keys or {KEYS_VARIABLE} is no public key; give the 64 "
                "hex digits that python -m engine.lineage keygen prints"
            )
    if not keys:
        raise ConfigError(
            "signatures are required, and no public key counts; name some in lineage.public_keys "
            f"or {KEYS_VARIABLE} (python -m engine.lineage keygen FILE makes a pair)"
        )
    return keys
