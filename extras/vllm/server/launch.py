"""Start vLLM's server with the transfer of this folder, if the vLLM of this interpreter has the interface that we rely on.

A script, run by the interpreter of an environment that holds vLLM and not this project. Takes vLLM's own command line
arguments, and before them ``--key-file FILE``, whose line ``api-key: KEY`` gives the key that callers must have:

    .venv-vllm-cpu/bin/python extras/vllm/server/launch.py --key-file FILE --model DIR ...

The modules beside this file are found because Python puts a script's folder first on the path.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Serve until a stop signal; the workers end with the server."""
    import guard
    import interface
    import tether

    place = sys.argv.index("--key-file")
    _, path = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    os.environ[guard.KEY] = Path(path).read_text().strip().removeprefix("api-key: ")
    os.environ[tether.SERVER] = str(os.getpid())
    # Workers are spawned, and import the modules beside this file.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the routes for pauses and updates
    if lacking := interface.missing():
        import vllm

        version = getattr(vllm, "__version__", "of unknown version")
        sys.exit(f"vLLM {version} lacks what Rollmill relies on: {'; '.join(lacking)}")
    import importlib

    importlib.import_module(interface.SERVER).main()


if __name__ == "__main__":
    main()
