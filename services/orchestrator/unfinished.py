"""Training groups with open slots, found by the version on which these began. Knows nothing about staleness or replicas."""

from __future__ import annotations

from services.orchestrator.groups import TaskGroup


class UnfinishedGroups:
    def __init__(self) -> None:
        self._by_version: dict[str, dict[int, dict[str, TaskGroup]]] = {}  # policy -> version -> by name, in order

    def add(self, group: TaskGroup) -> None:
        """``group.born`` must not change before it is removed."""
        for policy, version in group.born.items():
            self._by_version.setdefault(policy, {}).setdefault(version, {})[group.id] = group

    def remove(self, group: TaskGroup) -> None:
        """Removing one that is not there is harmless."""
        for policy, version in group.born.items():
            groups = self._by_version.get(policy, {}).get(version, {})
            groups.pop(group.id, None)
            if not groups:
                self._by_version.get(policy, {}).pop(version, None)

    def begun_before(self, policy: str, version: int) -> list[TaskGroup]:
        """Groups whose open slots began on an older version of the policy, oldest first."""
        found = self._by_version.get(policy, {})
        return [group for born in sorted(found) if born < version for group in found[born].values()]
