"""``python -m rollmill``: the command ``rollmill``."""

from services.cli.__main__ import main

main()
