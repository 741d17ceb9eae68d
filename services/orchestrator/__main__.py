"""``python -m services.orchestrator --run-dir DIR``"""

from __future__ import annotations

import sqlite3
import sys

from services.orchestrator.config import parse


def run() -> int:
    settings = parse()

    import asyncio

    from services.common.errors import UserError
    from services.common.security import identity
    from services.common.security.keys import Role
    from services.common.system.child import START_AGAIN, die_with_parent_if_asked
    from services.common.system.machine import says_full
    from services.common.telemetry.logs import settle
    from services.orchestrator.app import main

    die_with_parent_if_asked()
    settle()
    try:
        identity.configure(Role.ORCHESTRATOR)
        asyncio.run(main(settings))
    except UserError as error:
        sys.stderr.write(f"orchestrator: {error.message}\n")
        return 2
    except (OSError, sqlite3.OperationalError) as error:
        if not says_full(error):
            raise
        sys.stderr.write(
            f"orchestrator: no free disk: {error}; after a restart the orchestrator waits for free space\n"
        )
        return START_AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(run())
