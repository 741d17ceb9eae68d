"""Compile ``protos/rollmill/v1/*.proto`` into ``services/common/pb`` (``python protos/generate.py [OUTPUT]``).

protoc writes ``from rollmill.v1 import x_pb2``, which is wrong for any other location, and has no option for it,
so the import is rewritten in ``.py`` and ``.pyi`` alike. Stubs of files without a service are dropped.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OUTPUT = ROOT.parent / "services" / "common" / "pb"
IMPORT = re.compile(r"^from rollmill\.v1 import ", re.MULTILINE)
# mypy-protobuf names other files in full, on the import line and in every annotation.
QUALIFIED = re.compile(r"\brollmill\.v1\.(\w+_pb2)\b")


def generate(output: Path) -> list[Path]:
    """Compile into ``output`` and return the files written; raises ``RuntimeError`` when protoc refuses."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted((ROOT / "rollmill" / "v1").glob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    written: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        # protoc looks for its plugins on the path, where an environment that is not activated has none.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        if protoc.main(arguments + [str(p) for p in protos]) != 0:
            raise RuntimeError("protoc refused the protos; see its message above")
        output.mkdir(parents=True, exist_ok=True)
        for proto in protos:
            has_service = bool(re.search(r"^service ", proto.read_text(), re.MULTILINE))
            for source in sorted((Path(scratch) / "rollmill" / "v1").glob(f"{proto.stem}_pb2*")):
                if "_pb2_grpc" in source.name and not has_service:
                    continue
                target = output / source.name
                text = IMPORT.sub("from . import ", source.read_text())
                if source.suffix == ".pyi":
                    text = QUALIFIED.sub(r"services.common.pb.\1", text)
                target.write_text(text)
                written.append(target)
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT):
        sys.stdout.write(f"{path}\n")
