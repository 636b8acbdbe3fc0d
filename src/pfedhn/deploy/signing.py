"""Keys and signatures: who holds the private half of a key has said what carries its signature.

One key serves a party for everything: it opens sessions and signs replies with it (ECDSA, P-384).
"""

import base64
import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from pfedhn.deploy.wire import Message, WireError, enveloped, from_envelope, packed, unpacked
from pfedhn.errors import UserError
from pfedhn.system.files import read_bytes, write_atomically

# Signed bytes begin with their purpose, so that no signature means anything elsewhere.
PURPOSE = b"pfedhn message 1\0"
ENROLLMENT = b"pfedhn enrollment 1\0"
SESSION = b"pfedhn session 2\0"
RECORD = b"pfedhn record 1\0"

ALGORITHM = ec.ECDSA(hashes.SHA384())

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def sealed(message: Message, key: PrivateKey) -> bytes:
    """A message with the sender's signature over every byte of it."""
    content = packed(message)
    return enveloped(key.sign(PURPOSE + content, ALGORITHM), content)


def opened(envelope: bytes, key: PublicKey, limit: int | None = None) -> Message:
    """The message of an envelope of at most `limit` bytes that the holder of this key has signed; no other is read."""
    if limit is not None and len(envelope) > limit:
        raise WireError("size", f"sent {len(envelope):,} bytes where {limit:,} are the most")
    signature, content = from_envelope(envelope)
    if not _is_signed(signature, PURPOSE + content, key):
        raise WireError("signature", "sent a message that its key has not signed")
    return unpacked(content)


def evidence(envelope: bytes) -> tuple[str, str]:
    """The digest of a sealed message and the sender's signature over it, by which it can be proven without it."""
    signature, content = from_envelope(envelope)
    found = hashlib.sha384(PURPOSE)
    found.update(content)
    return found.hexdigest(), signature.hex()


def is_evidence(digest: str, signature: str, key: PublicKey) -> bool:
    """Whether the holder of this key has signed a message with this digest."""
    try:
        key.verify(bytes.fromhex(signature), bytes.fromhex(digest), ec.ECDSA(Prehashed(hashes.SHA384())))
    except (InvalidSignature, ValueError):
        return False
    return True


def signed_line(key: PrivateKey, digest: str) -> str:
    """The signature of a line of a record."""
    return key.sign(RECORD + digest.encode(), ALGORITHM).hex()


def has_signed_line(signature: str, key: PublicKey, digest: str) -> bool:
    """Whether this is the signature of a line of a record."""
    try:
        return _is_signed(bytes.fromhex(signature), RECORD + digest.encode(), key)
    except ValueError:
        return False


def proof(key: PrivateKey, name: str, authority: str, agreed: str = "") -> bytes:
    """Show the server of an authority that a party holds the key that it hands in, and what the party agreed to.

    `agreed` is the digest of the study.
    """
    return key.sign(_enrollment(name, authority, agreed), ALGORITHM)


def is_proven(signature: bytes, key: PublicKey, name: str, authority: str, agreed: str = "") -> bool:
    """Whether such a proof is one."""
    return _is_signed(signature, _enrollment(name, authority, agreed), key)


def session_proof(key: PrivateKey, name: str, nonce: str, authority: str) -> bytes:
    """What shows the server of an authority, by something new of its own, that a party holds its key now.

    Another server cannot use it: a party may have one key for several.
    """
    return key.sign(_session(name, nonce, authority), ALGORITHM)


def holds_key(signature: bytes, key: PublicKey, name: str, nonce: str, authority: str) -> bool:
    """Whether such a proof is one."""
    return _is_signed(signature, _session(name, nonce, authority), key)


def _is_signed(signature: bytes, content: bytes, key: PublicKey) -> bool:
    try:
        key.verify(signature, content, ALGORITHM)
    except InvalidSignature:
        return False
    return True


def _enrollment(name: str, authority: str, agreed: str) -> bytes:
    return ENROLLMENT + b"\0".join(part.encode() for part in (name, authority, *([agreed] if agreed else [])))


def _session(name: str, nonce: str, authority: str) -> bytes:
    return SESSION + b"\0".join(part.encode() for part in (name, nonce, authority))


def public_text(key: PublicKey) -> str:
    """A public key as one line, as OpenSSH writes it."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def fingerprint(line: str) -> str:
    """The fingerprint of a public key in one line, as `ssh-keygen -l` prints it."""
    parts = line.split()
    digest = hashlib.sha256(base64.b64decode(parts[1])).digest() if len(parts) > 1 else b""
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def key_text(key: PublicKey) -> bytes:
    """A public key as Flower writes it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def public_key(text: str) -> PublicKey:
    """The key of such a line; a comment after it does not matter."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise UserError("this is no public key for a party; make one with: ssh-keygen -t ecdsa -b 384.")
    return key


def load_or_make_key(path: Path) -> PrivateKey:
    """Read the private key of a file that only its owner can read, or make one."""
    if not path.exists():
        key, form = new_key(), serialization.PrivateFormat.OpenSSH
        write_private(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return key
    try:
        loaded = serialization.load_ssh_private_key(read_bytes(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        loaded = None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or not isinstance(loaded.curve, ec.SECP384R1):
        raise UserError(f"{path} holds no private key without a password; make one: ssh-keygen -t ecdsa -b 384.")
    return loaded


def write_private(path: Path, content: bytes) -> None:
    """Write a file that nobody but its owner can read."""
    write_atomically(path, content, mode=0o600)
