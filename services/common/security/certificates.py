"""Certificates of a run: its own authority, and the certificates signed by the authority. ECDSA over P-256; imports
``cryptography``.

Role and run are in a URI of the certificate, ``rollmill://run/<id>/role/<role>``. Only this authority is trusted, so a
certificate of another run fails in the handshake.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.errors import ConfigError
from services.common.security.keys import PEERS_OF, Holder, Role

BACKDATE_S = 300.0  # for machines whose clocks differ a little
AUTHORITY_DAYS = 730.0

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_NAME_LENGTH = 64  # X.520's limit of a common name


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, PEM both."""

    certificate: bytes
    key: bytes


def make_key() -> bytes:
    """A new private key, PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_part(key: bytes) -> bytes:
    """The public key of a private one, PEM."""
    return (
        _private(key)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def make_authority(run: str, now: float) -> Pair:
    """The authority of one run; signs certificates of processes, and no other authority."""
    key = make_key()
    name = _name(f"rollmill run {run}")
    certificate = _builder(name, name, key, now, AUTHORITY_DAYS, signs=True).sign(_private(key), hashes.SHA256())
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), key)


def issue(authority: Pair, run: str, role: Role, hosts: Sequence[str], now: float, days: float) -> Pair:
    """A certificate of one role, with a new key. ``hosts``: names and addresses of the process besides loopback.

    Raises ``ConfigError`` if the certificate would outlive the authority.
    """
    signer = x509.load_pem_x509_certificate(authority.certificate)
    if now + days * 86400 > signer.not_valid_after_utc.timestamp():
        raise ConfigError(
            f"certificates of {days:g} days would outlive the authority, which ends at {signer.not_valid_after_utc:%F}: "
            "ask for fewer --days, or make all keys anew in another directory"
        )
    key = make_key()
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(role_uri(run, role))]
    if role in PEERS_OF:
        uses.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        names += [x509.DNSName(peer.dns_name) for peer in PEERS_OF[role]]
        names += [general_name(host) for host in dict.fromkeys([*_LOOPBACK, *hosts])]
    signer_key = _private(authority.key)
    certificate = (
        _builder(_name(f"{role.value} of run {run}"), signer.subject, key, now, days, signs=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key()), critical=False)
        .sign(signer_key, hashes.SHA256())
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), key)


def _builder(
    name: x509.Name, issuer: x509.Name, key: bytes, now: float, days: float, *, signs: bool
) -> x509.CertificateBuilder:
    """What all certificates have; ``signs``: that of an authority, which signs no other authority."""
    public = _private(key).public_key()
    usages = (
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "encipher_only",
        "decipher_only",
    )
    usage = x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **dict.fromkeys(usages, False)
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - BACKDATE_S))
        .not_valid_after(_moment(now + days * 86400))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def role_uri(run: str, role: Role) -> str:
    return f"rollmill://run/{quote(run, safe='')}/role/{role.value}"


def holder_of(certificate: bytes) -> Holder:
    """The holder of a certificate (PEM or DER). Its signature is not checked here: the handshake did, or will.

    Raises ``ConfigError`` for anything but a certificate of a run.
    """
    pem = certificate.lstrip().startswith(b"-----")
    try:
        read = x509.load_pem_x509_certificate(certificate) if pem else x509.load_der_x509_certificate(certificate)
    except ValueError:
        raise ConfigError("this is no certificate, or a part of one") from None
    try:
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        run, role = _from_uri(uris)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"this is no certificate of a run: {error}") from None
    return Holder(
        run=run,
        role=role,
        name=f"{role.value}/{hashlib.sha256(certificate).hexdigest()[:16]}",
        begins_at=read.not_valid_before_utc.timestamp(),
        ends_at=read.not_valid_after_utc.timestamp(),
        shown="certificate",
    )


def is_pair(certificate: bytes, key: bytes) -> bool:
    """Whether the key is the certificate's; False while one of two files has been renewed."""
    try:
        return x509.load_pem_x509_certificate(certificate).public_key() == _private(key).public_key()
    except (ValueError, ConfigError):
        return False


def is_certificate(pem: bytes) -> bool:
    """Whether this is a certificate at all."""
    try:
        x509.load_pem_x509_certificate(pem)
    except ValueError:
        return False
    return True


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether the authority (PEM) has signed this certificate (DER)."""
    try:
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _from_uri(uris: Sequence[str]) -> tuple[str, Role]:
    for uri in uris:
        parts = uri.split("/")
        if len(parts) == 6 and parts[:3] == ["rollmill:", "", "run"] and parts[4] == "role":
            return unquote(parts[3]), Role(parts[5])
    raise ValueError("it names no role")


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        loaded = serialization.load_pem_private_key(key, password=None)
    except (ValueError, TypeError):
        raise ConfigError("this is no private key as `rollmill keys` makes them") from None
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise ConfigError("this is no private key as `rollmill keys` makes them")
    return loaded


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_NAME_LENGTH])])


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def general_name(host: str) -> x509.GeneralName:
    """A host in the form of certificates. Raises ``ConfigError`` for an invalid one."""
    bare = host.strip("[]")
    try:
        return x509.IPAddress(ipaddress.ip_address(bare))
    except ValueError:
        pass
    if not _HOST.fullmatch(bare):
        raise ConfigError(f"{host!r} is neither an address nor the name of a host")
    return x509.DNSName(bare)
