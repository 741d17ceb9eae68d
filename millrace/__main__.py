"""``python -m millrace``: the command ``millrace``."""

from services.cli.__main__ import main

main()
