"""Version ledger of one policy: its weight versions, their digests, and the addresses that serve them.

Invariant: a version number has one digest for ever. A version with a lost record still counts: its number is taken, and
its digest is unknown until the trainer offers the version again. Independent of tensors and transports.
"""

from __future__ import annotations

from services.common.errors import InvalidRequestError, VersionConflictError
from services.common.records.types import WeightVersion


class VersionLedger:
    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._versions: dict[int, WeightVersion] = {}
        self.newest_number = -1  # before the first version
        self._offered_otherwise = -1  # the newest number that its trainer offered with another digest

    @property
    def offered_otherwise(self) -> bool:
        """Whether the trainer offered the newest version with another digest: it replayed a recorded batch to other bits, so
        a replica that does not hold the version cannot fetch it."""
        return self.newest_number >= 0 and self._offered_otherwise == self.newest_number

    @property
    def newest(self) -> WeightVersion | None:
        """None before the first version, and while the record of the newest version is lost."""
        return self._versions.get(self.newest_number)

    @property
    def lacks_newest(self) -> bool:
        """The newest version exists, but its record is lost: its trainer has to offer the version again."""
        return self.newest_number >= 0 and self.newest_number not in self._versions

    def get(self, number: int) -> WeightVersion | None:
        return self._versions.get(number)

    def knows(self, number: int, digest: str) -> bool:
        version = self._versions.get(number)
        return version is not None and version.digest == digest

    def check(self, version: WeightVersion) -> bool:
        """Whether this version may be recorded: True for a new version, False for a known one.

        Raises:
            VersionConflictError: the number has another digest.
            InvalidRequestError: the number leaves a gap.
        """
        known = self._versions.get(version.number)
        if known is not None:
            if known.digest != version.digest:
                self._offered_otherwise = max(self._offered_otherwise, version.number)
                raise VersionConflictError(
                    f"version {version.number} of {self.policy} has digest {known.digest}, not {version.digest}: "
                    "the trainer did not replay its recorded batches exactly; replicas that do not hold it wait for the next "
                    "version",
                    policy=self.policy,
                    version=str(version.number),
                )
            if self._offered_otherwise == version.number:
                self._offered_otherwise = -1  # a trainer serves it as recorded again
            return False
        if not 0 <= version.number <= self.newest_number + 1:
            raise InvalidRequestError(
                f"version {version.number} of {self.policy} cannot follow version {self.newest_number}",
                policy=self.policy,
            )
        return True

    def record(self, version: WeightVersion) -> bool:
        """Record a version, or refresh the addresses of a known one; True for a new version."""
        new = self.check(version)
        if new or version.sources:
            self._versions[version.number] = version
            self.newest_number = max(self.newest_number, version.number)
        return new

    def lose(self, number: int) -> None:
        """Versions up to this number exist, also those of which there is no record."""
        self.newest_number = max(self.newest_number, number)
