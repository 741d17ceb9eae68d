"""The version ledger of one policy: which weight versions exist, with which digest, and where they can be fetched.

Invariant: a version number has one digest for ever. A version whose record was lost still counts: its number is taken,
and its digest is unknown until the trainer offers it again. Knows nothing about tensors or transports.
"""

from __future__ import annotations

from services.common.errors import InvalidRequestError, VersionConflictError
from services.common.types import WeightVersion


class VersionLedger:
    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._versions: dict[int, WeightVersion] = {}
        self._newest_number = -1

    @property
    def newest(self) -> WeightVersion | None:
        """None when nothing is published, and while the record of the newest version is lost."""
        return self._versions.get(self._newest_number)

    @property
    def newest_number(self) -> int:
        """-1 when nothing is published."""
        return self._newest_number

    @property
    def lacks_newest(self) -> bool:
        """The newest version exists, but its record is lost: its trainer has to offer it again."""
        return self._newest_number >= 0 and self._newest_number not in self._versions

    def get(self, number: int) -> WeightVersion | None:
        return self._versions.get(number)

    def knows(self, number: int, digest: str) -> bool:
        version = self._versions.get(number)
        return version is not None and version.digest == digest

    def check(self, version: WeightVersion) -> bool:
        """May this version be recorded? True when it is new, False when it is known already.

        Raises:
            VersionConflictError: the number has another digest.
            InvalidRequestError: the number leaves a gap.
        """
        known = self._versions.get(version.number)
        if known is not None:
            if known.digest != version.digest:
                raise VersionConflictError(
                    f"version {version.number} of {self.policy} has digest {known.digest}, not {version.digest}: "
                    "the trainer did not replay its recorded batches exactly",
                    policy=self.policy,
                    version=str(version.number),
                )
            return False
        if not 0 <= version.number <= self._newest_number + 1:
            raise InvalidRequestError(
                f"version {version.number} of {self.policy} cannot follow version {self._newest_number}",
                policy=self.policy,
            )
        return True

    def record(self, version: WeightVersion) -> bool:
        """Record a version, or refresh the addresses of a known one; True when it is new."""
        new = self.check(version)
        if new or version.sources:
            self._versions[version.number] = version
            self._newest_number = max(self._newest_number, version.number)
        return new

    def lose(self, number: int) -> None:
        """Versions up to this number exist, also those of which there is no record."""
        self._newest_number = max(self._newest_number, number)
