"""Runs Code Judge's own test suite against our HTTP interface.

Takes tests/test_main.py of a checkout of Code Judge as it is, and runs it against a gateway of ours with four slots:
only the client fixture is another. ``ours`` is the share that passes, and ``differ`` names the tests that do not, with
the assertion. Two differ on purpose: they want the text "Suicide from timeout." on the standard output of a program
that was stopped, which is Code Judge's own prologue speaking; here stdout is the program's, and the reason of the stop
is in ``reason`` and in stderr.

    python benchmarks/code_judge_suite.py --peer CHECKOUT
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from pathlib import Path

from benchmarks._bench import report, report_nothing, why_not

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from extras.code_judge.settings import HttpConfig
from services.common.config.envgateway import EnvGatewayConfig, SandboxConfig
from services.envgateway.app import Gateway
from services.envgateway.sandbox.pool import SandboxPool

_SUITE = "tests/test_main.py"
_LIMIT_S = 4.0
_TIMEOUT_S = 300.0
_CONFTEST = """
import json, urllib.request, pytest

class Response:
    def __init__(self, status, body):
        self.status_code, self.text = status, body.decode()
    def json(self):
        return json.loads(self.text)

class Client:
    def _send(self, path, data=None):
        request = urllib.request.Request(BASE + "/" + path.lstrip("/"), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Response(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return Response(error.code, error.read())
    def get(self, path):
        return self._send(path)
    def post(self, path, json=None):
        import json as text
        return self._send(path, text.dumps(json).encode())

@pytest.fixture(scope="session")
def test_client():
    return Client()
"""


async def measure(suite: Path) -> None:
    sandbox = SandboxConfig(num_slots=4, wall_time_s=_LIMIT_S, cpu_time_s=_LIMIT_S)
    config = EnvGatewayConfig.model_validate({"port": 0, "sandbox": sandbox, "http": HttpConfig(port=0)})
    gateway = Gateway(config, SandboxPool.start_before_threads(sandbox))
    await gateway.start()
    try:
        assert gateway.http is not None
        told = await _run_suite(suite, f"http://127.0.0.1:{gateway.http.port}")
    finally:
        await gateway.stop()
    print(told)
    passed = sum(map(int, re.findall(r"(\d+) passed", told)))
    failed = sum(map(int, re.findall(r"(\d+) failed", told)))
    differ = dict(re.findall(r"^FAILED \S+::(\S+) - (.*)$", told, re.MULTILINE))
    share = passed / (passed + failed) if passed + failed else None
    report("code_judge_suite", share, 1.0, share, 0.0, tests=passed + failed, passed=passed, differ=differ)


async def _run_suite(suite: Path, base: str) -> str:
    """The output of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder), suite, base)
        command = [
            "-m",
            "pytest",
            "-q",
            "-rf",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-c",
            "/dev/null",
            "--rootdir",
            folder,
            folder,
        ]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )  # fmt: skip
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
    return output.decode()


def _prepare(folder: Path, suite: Path, base: str) -> None:
    (folder / "conftest.py").write_text(f"BASE = {base!r}\n{_CONFTEST}")
    (folder / suite.name).write_text(suite.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: about a minute")
    parser.add_argument("--peer", type=Path, help="a checkout of Code Judge")
    arguments = parser.parse_args()
    suite = arguments.peer / _SUITE if arguments.peer else None
    if suite is None or not suite.is_file():
        report_nothing("code_judge_suite", f"--peer names no checkout of Code Judge with {_SUITE}")
    elif reason := why_not("isolating sandbox"):
        report_nothing("code_judge_suite", reason)
    else:
        asyncio.run(measure(suite))


if __name__ == "__main__":
    main()
