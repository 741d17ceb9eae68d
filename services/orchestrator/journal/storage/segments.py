"""Names and sizes of segment files: ``<kind>-000001.jsonl.zst``, sequences of records, written only at the end.

They are the truth; the index is made from them. One kind per file, so that every line has the same columns and
`datasets` can open them. Independent of SQLite and the meaning of records.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection
from pathlib import Path

from services.common.errors import ConfigError

COLLECTED = "collected"  # kind of the records that name segments which retention deletes

_NAME = re.compile(r"^([a-z_]+)-(\d{6,15})\.jsonl\.zst$", re.ASCII)
_OLD_NAME = re.compile(r"^[a-z_]+-\d{6,}\.jsonl$")

# No run reaches this number: names of files may have larger ones, and new segments do not continue those.
_MOST_SEGMENTS = 10**12

Place = tuple[str, int]  # kind and segment


def segment_path(directory: Path, kind: str, segment: int) -> Path:
    return directory / f"{kind}-{segment:06d}.jsonl.zst"


def sizes_in(directory: Path) -> dict[Place, int]:
    """Bytes of every segment file, in order of segment and kind; 0 for a name that is no file and for a broken link.

    Raises ``ConfigError`` for a journal of plain jsonl segments.
    """
    found: dict[Place, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if match := _NAME.match(entry.name):
                size = _size_of(entry)
                if size is not None:
                    found[match[1], int(match[2])] = size
            elif _OLD_NAME.match(entry.name):
                raise ConfigError(
                    f"the journal in {directory} has plain jsonl segments ({entry.name}), which millrace wrote before its "
                    "segments were compressed (.jsonl.zst): go on with that release, or start a new run directory"
                )
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def _size_of(entry: os.DirEntry[str]) -> int | None:
    """Bytes of a segment file; None for one that was deleted meanwhile."""
    try:
        status = entry.stat()
    except FileNotFoundError:
        return 0 if entry.is_symlink() else None
    except OSError:  # a loop of links, or a disk with a read error
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def first_free(segments: Collection[int]) -> int:
    """The number of the next segment."""
    first = max((segment for segment in segments if segment < _MOST_SEGMENTS), default=0) + 1
    while first in segments:
        first += 1
    return first
