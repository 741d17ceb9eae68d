"""``python -m services.trainer``: one rank of the trainer of one policy. Arguments first, torch later."""

from __future__ import annotations

import os
import signal
import sys

from services.common.errors import DeadlineError, InfrastructureError, MillraceError, UserError
from services.common.logs import quiet_grpc
from services.common.process import DIE_WITH_PARENT, START_AGAIN, die_with_parent_if_asked, run_and_leave
from services.trainer.config import parse


def main() -> int:
    settings = parse()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ[DIE_WITH_PARENT] = str(os.getppid())  # torchrun, not whoever started torchrun
        # It was killed and is started again, with ranks that need our ports and files: no step is finished for that.
        die_with_parent_if_asked(signal.SIGKILL)
    else:
        die_with_parent_if_asked()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    quiet_grpc()
    from services.common.security import identity
    from services.common.security.roles import Role
    from services.trainer.app import run_trainer

    try:
        identity.configure(Role.TRAINER)
        run_trainer(settings)
    except UserError as error:
        sys.stderr.write(f"trainer: {error.message}\n")
        return 2
    except (MillraceError, RuntimeError) as error:
        from services.trainer.peers import peer_loss

        if lost := peer_loss(error):
            sys.stderr.write(f"trainer: {lost.message}; started again, all ranks resume together\n")
            return START_AGAIN
        if not isinstance(error, MillraceError):
            raise
        sys.stderr.write(f"trainer: {error.message}\n")
        return START_AGAIN if isinstance(error, InfrastructureError | DeadlineError) else 1
    return 0


if __name__ == "__main__":
    run_and_leave(main)
