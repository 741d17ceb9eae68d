"""C++: a confined child of the ``native`` profile compiles a program, or becomes the compiled program.

Diagnostics about any file but the program's own and the compiler's headers are left out: no text of files that a
program makes the preprocessor read is shown.
"""

from __future__ import annotations

import os
import re
import signal

from . import seccomp

COMPILER = "/usr/bin/g++"
# Readable and executable for the compiler alone; those that do not exist are left out.
TOOL_TREES = ["/usr/bin", "/bin", "/usr/include", "/usr/local/include", "/usr/libexec", "/usr/lib", "/usr/lib64",
              "/etc/alternatives"]  # fmt: skip
# For commands of a shell, at tier 2: the programs of this machine. No home, no service's data, no keys of the machine.
SHELL_TREES = ["/usr", "/bin", "/sbin", "/etc/alternatives", "/etc/passwd", "/etc/group", "/etc/mime.types",
               "/etc/python3", "/etc/perl", "/etc/java", "/etc/fonts"]  # fmt: skip
_SOURCE, _OUTPUT = "main.cpp", "program"
_STANDARDS = ("c++23", "c++20", "c++17")  # the newest that the compiler knows is taken
_FLAGS = ("-O2", "-fmax-errors=5", "-fdiagnostics-color=never", "-fno-diagnostics-show-caret",
          "-ftemplate-depth=512")  # fmt: skip
_OWN_LINE = re.compile(
    rb"(In file included from |\s+from )?(main\.cpp\b|/usr/include/|/usr/lib/gcc/|/usr/bin/ld: |collect2: |cc1plus: "
    rb"|g\+\+: |compilation terminated)"
)
_COMPILE_FAILED_EXIT = 1
_standard = [_STANDARDS[-1]]


def choose_standard() -> None:
    """Find the newest standard of the compiler, where there is one, for all that is compiled later."""
    quiet = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
    for standard in _STANDARDS if os.access(COMPILER, os.X_OK) else ():
        arguments = [COMPILER, f"-std={standard}", "-fsyntax-only", "-x", "c++", "/dev/null"]
        if os.waitpid(os.posix_spawn(COMPILER, arguments, {"PATH": "/usr/bin:/bin"}, file_actions=quiet), 0)[1] == 0:
            _standard[0] = standard
            return


def compile_program(source: bytes, answer_fd: int) -> int:
    """Compile. Returns the compiler's exit code; the program's bytes go to ``answer_fd``, diagnostics to stderr."""
    with open(_SOURCE, "wb") as file:
        file.write(source)
    os.closerange(3, answer_fd)
    os.closerange(answer_fd + 1, 1 << 16)
    said_read, said_write = os.pipe()
    arguments = [COMPILER, f"-std={_standard[0]}", *_FLAGS, _SOURCE, "-o", _OUTPUT]
    actions = [(os.POSIX_SPAWN_DUP2, said_write, 1), (os.POSIX_SPAWN_DUP2, said_write, 2)]
    # "." and not the directory's name: a folder above may be closed to the slot's user, as /tmp is on some machines.
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": "."}
    compiler = os.posix_spawn(COMPILER, arguments, environment, file_actions=actions)
    os.close(said_write)
    with open(said_read, "rb") as said:
        for line in said:
            os.write(2, _shown(line))
    _, status = os.waitpid(compiler, 0)
    if status != 0:
        return _COMPILE_FAILED_EXIT
    with open(_OUTPUT, "rb") as made:
        while chunk := made.read(1 << 20):
            view = memoryview(chunk)
            while view:
                view = view[os.write(answer_fd, view) :]
    return 0


def _shown(line: bytes) -> bytes:
    return line if _OWN_LINE.match(line) else b"(a line about another file)\n"


def become(program_fd: int) -> int:
    """Replace this process by the program in the descriptor. Returns only when that fails."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by the interpreter; a program starts with the defaults
        signal.signal(ignored, signal.SIG_DFL)
    os.closerange(3, program_fd)
    os.closerange(program_fd + 1, 1 << 16)
    seccomp.execute_and_nothing_more(program_fd, [b"program"], [b"PATH=/usr/bin:/bin", b"LANG=C.UTF-8"])
    return 1
