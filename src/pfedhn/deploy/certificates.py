"""A certificate authority for one federation: parties trust it alone, so that nobody else can vouch for a server."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedhn.deploy.signing import write_private
from pfedhn.errors import UserError
from pfedhn.system.files import read_bytes, write_atomically

AUTHORITY, AUTHORITY_KEY = "ca.crt", "ca.key"
SERVER, SERVER_KEY = "server.crt", "server.key"
YEARS = 10  # that the authority lasts
DAYS = 365  # that the server's certificate lasts; it is made anew when a third of that is left


def make_certificates(folder: Path, hosts: Sequence[str]) -> bool:
    """The authority's and the server's certificates; what is there and good for these hosts stays.

    Returns whether there is a new one.

    A person who brings her own authority puts ca.crt, server.crt and server.key there, and no ca.key.
    """
    if not (folder / AUTHORITY).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pfedhn federation")])
        authority = _builder(name, name, key.public_key(), YEARS * 365)
        authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        authority = authority.add_extension(_usage(is_authority=True), critical=True)
        authority = authority.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        write_private(folder / AUTHORITY_KEY, _private_text(key))
        write_atomically(folder / AUTHORITY, _text(authority.sign(key, hashes.SHA256())))
    has_both = (folder / SERVER).exists() and (folder / SERVER_KEY).exists()
    if has_both and (not (folder / AUTHORITY_KEY).exists() or _is_good(folder, hosts)):
        return False
    if not (folder / AUTHORITY_KEY).exists():
        raise UserError(
            f"{folder} has {AUTHORITY}, but no {SERVER} or no {SERVER_KEY}; put the server's certificate and key there."
        )
    _make_server(folder, hosts)
    return True


def _make_server(folder: Path, hosts: Sequence[str]) -> None:
    authority = x509.load_pem_x509_certificate(read_bytes(folder / AUTHORITY))
    signer = serialization.load_pem_private_key(read_bytes(folder / AUTHORITY_KEY), password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
    certificate = _builder(name, authority.subject, key.public_key(), DAYS)
    alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    certificate = certificate.add_extension(alternatives, critical=False)
    certificate = certificate.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    certificate = certificate.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    certificate = certificate.add_extension(_usage(is_authority=False), critical=True)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = certificate.add_extension(issuer, critical=False)
    write_private(folder / SERVER_KEY, _private_text(key))
    write_atomically(folder / SERVER, _text(certificate.sign(signer, hashes.SHA256())))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of parties may be slow
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_good(folder: Path, hosts: Sequence[str]) -> bool:
    """Whether the server's certificate names all hosts and lasts for a while."""
    certificate = x509.load_pem_x509_certificate(read_bytes(folder / SERVER))
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return left > datetime.timedelta(days=DAYS / 3) and {_alternative(host) for host in hosts} <= set(names)


def _text(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_text(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
