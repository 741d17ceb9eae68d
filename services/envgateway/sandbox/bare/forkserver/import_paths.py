"""Import paths of a fork server's children, and the descriptors by which they reach directories."""

from __future__ import annotations

import os
import sys

from .entry import ANSWER, ASK, NOTE

_LIB_FD, _PACKAGES_FD = 3, 7  # beside the child's own numbers


def hold(path: str, fd: int) -> None:
    """Open a path with O_PATH, because children share the descriptor: O_PATH has no offset, flags or owner to set."""
    opened = os.open(path, os.O_PATH)
    if opened != fd:
        os.dup2(opened, fd)
        os.close(opened)


def _reachable(path: str) -> bool:
    """Whether any user could walk there."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


class ImportPaths:
    """Import paths of children. Directories that their users could not reach (a root-only home) are named by
    descriptor, except at tier 2, which mounts them at their own paths."""

    def __init__(self, tier: str, packages: dict[str, str], link_dir: str) -> None:
        self._by_name = tier == "2" or os.getuid() != 0
        self.library = os.path.dirname(os.__file__)
        # Placeholders: an open directory that is not needed would be a way past the root of tier 2.
        for fd in (_LIB_FD, NOTE, ASK, ANSWER, _PACKAGES_FD):
            hold("/dev/null", fd)
        shown = self._shown(self.library, _LIB_FD)
        self.moves = {self.library: shown}
        self.readable = [self.library]
        sys.path[:] = [shown, f"{shown}/lib-dynload"]
        self._show_packages(packages, link_dir)

    def _shown(self, directory: str, fd: int) -> str:
        """The directory under the name that children use."""
        if self._by_name or _reachable(directory):
            return directory
        hold(directory, fd)
        return f"/proc/self/fd/{fd}"

    def _show_packages(self, packages: dict[str, str], link_dir: str) -> None:
        """The packages that programs may import, and no other of the same directory: as links in one of our own."""
        if not packages:
            return
        site = os.path.dirname(next(iter(packages.values())))
        base = self._shown(site, _PACKAGES_FD)
        self.readable += [link_dir, *packages.values()]
        for name, path in packages.items():
            link = os.path.join(link_dir, name)
            if os.path.dirname(path) == site:
                try:
                    os.symlink(os.path.join(base, os.path.basename(path)), link)
                except FileExistsError:  # another profile's fork server was here
                    pass
        self.moves[site] = base
        sys.path.append(link_dir)

    def relocate(self) -> None:
        """Packages that are loaded find their parts by the same way as children do."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__path__", None)
            if not isinstance(path, list):
                continue
            for real, shown in self.moves.items():
                path[:] = [part.replace(real, shown, 1) if part.startswith(real) else part for part in path]
