"""Measures Rollmill on one GPU in at most nine minutes: eleven items, each in a process with a time limit of its own.

     1 machine     versions, driver, and the imports of every service
     2 tests       tests/gpu of trainer, engine, turns and snapshots
     3 trainer     Qwen3-0.6B, two documents of 16,384 tokens, bfloat16: tokens per second, memory, busy share, kernels
     4 adapter     LoRA of rank 16 on 8B and 4B: memory beside the estimate of `rollmill check`, tokens per second
     5 version     8B from float32 masters on the card to the weights of an engine on it, and to the stage of a server
     6 engine      decoding of Qwen3-0.6B, 64 slots x 2,048, with the shares of gather and attention
     7 head        blocks of the vocabulary head, and Liger's fused cross entropy
     8 varlen      attention of packed documents, forwards and backwards
     9 fused       the step of item 3 with Liger's kernels, and with compiled layers
    10 guide       docs/train-my-model.md with random weights of the true shape, one step, both processes on the card
    11 run         gpu_run.py: four steps in turns on one card

An item that fails or takes too long does not stop the others. The last line is one JSON object with all figures; ``problems``
names failures and figures outside their limits, and the exit code is then 1. ``OUT/gpu_kit.json`` has the same after each
item, ``OUT/gpu_kit.log`` the output of the items.

    python benchmarks/gpu_kit.py                       # on a GPU
    python benchmarks/gpu_kit.py --only trainer,guide
    python benchmarks/gpu_kit.py --device cpu          # small shapes: tests the script, its speeds have no meaning
    make gpu-kit                                       # packs what a machine without a package index needs (--pack)
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._bench import report_facts

# --- Packs what ``gpu_kit.py`` needs on a machine with Python 3.12, torch, CUDA, and no package index. Part of
# ``gpu_kit.py``.


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


# --- The benchmark itself.


Limit = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """``limits``: least and most of figures on an H100, names of nested ones with a dot."""

    function: str
    module: str = "_gpu_items"
    seconds: float
    limits: dict[str, Limit] = field(default_factory=dict)


ITEMS: dict[str, Item] = {
    "machine": Item(function="machine", seconds=60),
    "tests": Item(function="gpu_tests", seconds=150, limits={"passed": (18, None)}),
    # The least of trainer and adapter are prime-rl's published figures for these settings on an H100.
    "trainer": Item(
        function="trainer", seconds=100,
        limits={"tokens_per_s": (11_900, None), "memory_peak_gib": (None, 13), "busy": (0.9, None)},
    ),
    "adapter": Item(
        function="adapter", seconds=120, limits={"4b.tokens_per_s": (6230, None), "memory_over_formula": (0.95, 1.05)}
    ),
    "version": Item(
        function="version_8b", seconds=100, limits={"publish_to_swap_s": (None, 12), "publish_to_stage_load_s": (None, 12)}
    ),
    "engine": Item(function="engine", module="_gpu_items", seconds=100, limits={"tokens_per_s": (5000, None)}),
    "head": Item(function="head", module="_gpu_items", seconds=60),
    "varlen": Item(
        function="varlen", module="_gpu_items", seconds=60,
        limits={"1x16384.forward_tflops": (350, None), "1x16384.backward_tflops": (280, None)},
    ),
    "fused": Item(function="fused", seconds=120, limits={"liger_gap": (None, 0.03), "compiled_gap": (None, 0.03)}),
    "guide": Item(function="guide", seconds=200, limits={"card_peak_gib": (None, 20)}),
    "run": Item(function="shared_run", seconds=150, limits={"sequences_per_s": (15, None)}),
}  # fmt: skip
REST_S = 10.0  # of an item that was told to end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default=",".join(ITEMS), metavar="ITEMS", help="names separated by commas, in order")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu-kit-results"), help="folder"
    )
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all items (default: 540)")
    parser.add_argument("--quick", action="store_true", help="the same as --device cpu")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="pack tree and packages into this folder, and end")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)  # a child's
    options = parser.parse_args()
    device = "cpu" if options.quick else options.device
    if options.pack is not None:
        return pack(options.pack)
    if options.item is not None:
        return run_item(options.item, device, options.out)
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in ITEMS]:
        parser.error(f"--only has {unknown[0]!r}; the items are {', '.join(ITEMS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "device": device,
        "at": datetime.now(UTC).strftime("%Y-%m-%d"),
        "items": {},
        "problems": [],
    }
    ends = time.monotonic() + options.limit
    for name in names:
        play(name, device, options.out, min(ITEMS[name].seconds, ends - time.monotonic()), facts)
        (options.out / "gpu_kit.json").write_text(json.dumps(facts, indent=1))
    report_facts("gpu_kit", **facts)
    return 1 if facts["problems"] else 0


def play(name: str, device: str, out: Path, limit_s: float, facts: dict[str, Any]) -> None:
    """Run one item in a process group of its own, and add its figures and problems to ``facts``."""
    if limit_s <= 1.0:
        facts["problems"].append(f"{name}: no time was left")
        return
    path = out / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_kit", "--item", name, "--device", device, "--out", str(out)]
    root = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with (out / "gpu_kit.log").open("a") as log:
        log.write(f"== {name}\n")
        log.flush()
        process = subprocess.Popen(
            command, cwd=root, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)  # the services of a run end their own children
            time.sleep(5.0)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait(REST_S)
    told: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    for line in path.read_text().splitlines() if path.exists() else ():
        told |= json.loads(line)
    path.unlink(missing_ok=True)
    facts["items"][name] = told
    problems = list(outside(ITEMS[name], told)) if device == "cuda" and "error" not in told else []
    if code is None:
        problems = [f"not done after {limit_s:.0f} s"]
    elif "error" in told or code:
        problems = [told.get("error", f"exit code {code}")]
    facts["problems"] += [f"{name}: {problem}" for problem in problems]
    print(f"{name}: {told['seconds']} s {'; '.join(problems) or 'ok'}", flush=True)


def outside(item: Item, told: dict[str, Any]) -> Iterator[str]:
    """The figures that are outside their limits, or missing."""
    for key, (least, most) in item.limits.items():
        value: Any = told
        for part in [key] if key in told else key.rsplit(".", 1):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            yield f"{key} is missing"
        elif (least is not None and not value >= least) or (most is not None and not value <= most):
            yield f"{key} is {value:.4g}, expected {' to '.join('any' if v is None else f'{v:g}' for v in (least, most))}"


def run_item(name: str, device: str, out: Path) -> int:
    """In the child: write each figure as soon as it is known, and the error at the end if there is one."""
    from benchmarks._gpu_items import Place

    module = importlib.import_module(f"benchmarks.{ITEMS[name].module}")
    function: Callable[..., Iterator[dict[str, Any]]] = getattr(module, ITEMS[name].function)
    with (out / f"{name}.jsonl").open("w") as file:
        try:
            for figures in function(Place(device)):
                file.write(json.dumps(figures, default=str) + "\n")
                file.flush()
                print(figures, flush=True)
        except BaseException as error:
            file.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:1500]}) + "\n")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
