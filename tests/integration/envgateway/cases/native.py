"""C++: row 43, and that honest programs work."""

from __future__ import annotations

import os

from services.envgateway.judge.records import StdinCase, StdinTests
from services.envgateway.sandbox.bare.statuses import RunStatus
from tests.integration.envgateway.cases.model import CE, ML, OK, OL, RE, TL, WA, Bad, bad, first

_SUM = StdinTests(cases=tuple(StdinCase(stdin=f"{n} 1\n", expected=f"{n + 1}\n") for n in range(3)))
_ADD = '#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << "\\n"; }'


_LOADER = os.path.realpath(f"/lib64/ld-linux-{'x86-64' if os.uname().machine == 'x86_64' else 'aarch64'}.so.2")
_EXECUTES = f"""
#include <cstdio>
#include <initializer_list>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>
extern char **environ;
int main() {{
    int refused = 0;
    for (const char *path : {{"{_LOADER}", "/usr/lib/git-core/git", "/proc/self/exe", "./copy"}}) {{
        char *const arguments[] = {{(char *)path, (char *)"--version", nullptr}};
        if (fork() == 0) {{
            if (path[0] == '.') {{ unlink("copy"); symlink("{_LOADER}", "copy"); }}
            execv(path, arguments);
            syscall(SYS_execveat, open(path, O_RDONLY), "", arguments, environ, 0x1000);
            syscall(SYS_execveat, AT_FDCWD, path, arguments, environ, 0);
            int child, status = posix_spawn(&child, path, nullptr, nullptr, arguments, environ);
            _exit(status ? 42 : 1);
        }}
        int status = 0;
        wait(&status);
        refused += WIFEXITED(status) && WEXITSTATUS(status) == 42;
    }}
    std::printf("%d\\n", refused);
}}
"""


def _cpp(name: str, code: str, *verdicts: RunStatus, **more: object) -> Bad:
    return bad(43, name, code, *verdicts, language="cpp", **more)  # type: ignore[arg-type]


def _quiet(result: object) -> bool:
    said = first(result).stderr  # type: ignore[arg-type]
    return "root:" not in said and "planted" not in said and "'root'" not in said


CASES: list[Bad] = [
    _cpp("honest", _ADD, OK, tests=_SUM),
    _cpp("wrong", _ADD.replace("a + b", "a - b"), WA, tests=_SUM),
    _cpp("no-program", "int main( {", CE, check=lambda r: "main.cpp" in first(r).stderr),
    _cpp("template-recursion", "template<int N> struct A { enum { v = A<N - 1>::v + A<N - 2>::v }; };\nint main() { return A<5>::v; }", CE),
    _cpp("template-explosion", "template<int N, int M> struct A { enum { v = A<N - 1, 2 * M>::v + A<N - 1, 2 * M + 1>::v }; };\n"
         "template<int M> struct A<0, M> { enum { v = 1 }; };\nint main() { return A<22, 0>::v; }", CE),
    _cpp("endless-include", '#include "/dev/zero"\nint main() {}', CE, check=_quiet),
    _cpp("includes-itself", '#include "main.cpp"\nint main() {}', CE),
    _cpp("host-file", '#include "/etc/passwd"\nint main() {}', CE, check=_quiet),
    _cpp("canary-file", "#include CANARY_INCLUDE\nint main() {}", CE, check=_quiet),
    _cpp("huge-array", "int a[1 << 28] = {1};\nint main() { return a[0]; }", CE, check=_quiet),
    _cpp("assembler-reads-host-file", 'asm(".incbin \\"/etc/passwd\\"");\nint main() {}', CE, check=_quiet),
    _cpp("crash", "int main() { volatile int* p = 0; *p = 1; }", RE, check=lambda r: first(r).signal == 11),
    _cpp("spins", "int main() { volatile int x = 0; while (true) x++; }", TL, wall_s=0.5),
    _cpp("memory", "#include <vector>\nint main() { std::vector<char*> v; for (int i = 0; i < 60; i++) { char* p = new char[10 << 20]; "
         "for (int j = 0; j < 10 << 20; j += 512) p[j] = 1; v.push_back(p); } }", ML),
    _cpp("floods", '#include <cstdio>\nint main() { for (int i = 0; i < 1000000; i++) puts("xxxxxxxxxxxxxxxx"); }', OL),
    _cpp("executes-others", _EXECUTES, OK, expected="4"),
    _cpp("starts-a-shell", '#include <cstdlib>\n#include <cstdio>\nint main() { printf("%d\\n", system("cat /etc/passwd") == 0); }', OK,
         expected="0"),
]  # fmt: skip
