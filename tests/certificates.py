"""Certificates made by openssl for one test."""

import subprocess
from pathlib import Path


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path, name: str = "ca") -> Path:
    """NAME.pem and NAME.key."""
    openssl(directory, "req", "-x509", *_curve(name), "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")
    return directory / f"{name}.pem"


def make_certificate(directory: Path, name: str, authority: str = "ca") -> tuple[Path, Path]:
    """(certificate, key) for localhost, signed by the authority in the same directory; replaces what is there."""
    openssl(directory, "req", *_curve(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (directory / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
            "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext")  # fmt: skip
    return directory / f"{name}.pem", directory / f"{name}.key"


def _curve(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
