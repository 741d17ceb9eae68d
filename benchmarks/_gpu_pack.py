"""Packs what ``gpu_kit.py`` needs on a machine with Python 3.12, torch, CUDA, and no package index. Part of ``gpu_kit.py``.

One archive has the files under version control without pictures, and the packages of ``gpu_kit_requirements.txt`` in the
versions of ``constraints.txt``, installed for that Python. Parts have at most 60 MiB.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).with_name("gpu_kit_requirements.txt")
PYTHON = "3.12"
MANYLINUX = ("2014", "1", *(f"_2_{minor}" for minor in range(17, 36)))
LEFT_OUT = re.compile(r"\.(png|svg|gif|jpg)$|^docs/\w+\.jsonl$")
NAME = "rollmill-gpu-kit.tar.xz"
PART_BYTES = 60 << 20


def requirements() -> list[str]:
    """Names and versions of the packages."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    return [line if "==" in line else f"{line}=={pins[line]}" for line in lines if line]


def pack(folder: Path) -> int:
    """Write the archive, or its parts, and print the commands that unpack and start it."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{NAME}*"):
        old.unlink()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file() and not LEFT_OUT.search(name)]
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="rollmill-gpu-kit-") as made:
        site = Path(made) / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-compile", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
        command += [f"--platform=manylinux{tag}_x86_64" for tag in MANYLINUX]
        subprocess.run([*command, f"--target={site}", *requirements()], check=True)
        with tarfile.open(fileobj=packed, mode="w:xz", preset=6) as archive:
            archive.add(site, "site")
            for name in names:
                archive.add(ROOT / name, f"tree/{name}")
    data = packed.getvalue()
    parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
    for number, part in enumerate(parts):
        (folder / (NAME if len(parts) == 1 else f"{NAME}.{number}")).write_bytes(part)
    print(
        f"{folder}: {len(data) / 2**20:.1f} MiB in {len(parts)} part(s). On the other machine:\n\n"
        f"  cat {NAME}* > whole.tar.xz && python3 -m tarfile -e whole.tar.xz kit\n"
        "  cd kit/tree && PYTHONPATH=../site:. python3 benchmarks/gpu_kit.py --out ../results"
    )
    return 0
