"""Confinement of a child: namespaces, seccomp, Landlock, memory cgroups, disk quota."""
