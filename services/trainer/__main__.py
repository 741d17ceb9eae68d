"""``python -m services.trainer``: runs one rank of the trainer of one policy. Parses arguments before importing torch."""

from __future__ import annotations

import os
import signal
import sys

from services.common.errors import DeadlineError, InfrastructureError, RollmillError, UserError
from services.common.system.child import START_AGAIN, die_with_parent_if_asked, run_and_leave
from services.common.telemetry.logs import quiet_grpc, settle
from services.trainer.config import parse, set_defaults


def main() -> int:
    settings = parse()
    # A launcher that was killed is started again, and its ranks need our ports and files: leave without finishing a step.
    die_with_parent_if_asked(signal.SIGKILL if settings.ranked else signal.SIGTERM)
    settle()
    set_defaults(os.environ, ranked=settings.ranked)
    quiet_grpc()
    from services.common.security import identity
    from services.common.security.keys import Role
    from services.trainer.app import run_trainer

    try:
        identity.configure(Role.TRAINER)
        run_trainer(settings)
    except UserError as error:
        sys.stderr.write(f"trainer: {error.message}\n")
        return 2
    except (RollmillError, RuntimeError) as error:
        from services.trainer.ranks import peer_loss

        if lost := peer_loss(error):
            sys.stderr.write(f"trainer: {lost.message}; started again, all ranks resume together\n")
            return START_AGAIN
        if not isinstance(error, RollmillError):
            raise
        sys.stderr.write(f"trainer: {error.message}\n")
        return START_AGAIN if isinstance(error, InfrastructureError | DeadlineError) else 1
    return 0


if __name__ == "__main__":
    run_and_leave(main)
