"""docs/security.md has the table of permissions. To write the table anew, run this file as a program."""

from __future__ import annotations

from pathlib import Path

from services.common.security.identity import HTTP, RPCS, allowed
from services.common.security.keys import Role

PAGE = Path(__file__).resolve().parents[4] / "docs" / "security.md"
BEGIN, END = "<!-- permissions: begin -->\n| call | roles |\n|---|---|\n", "<!-- permissions: end -->"


def rows() -> str:
    doors = [(f"`{service.rpartition('.')[2]}.{method}`" if service.startswith("rollmill") else f"`{service}.{method}`",
              f"/{service}/{method}") for service, methods in RPCS.items() for method in methods]  # fmt: skip
    doors += [(f"HTTP: {group.replace('_', ' ')}", f"http:{group}") for group in HTTP]
    return "".join(f"| {name} | {roles(what)} |\n" for name, what in doors)


def roles(what: str) -> str:
    return ", ".join(sorted(role.value for role in allowed(what)))


def test_the_table_of_calls_is_that_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == rows()


def test_every_role_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [role.value for role in Role if f"| `{role.value}` |" not in text] == []


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + rows() + END + rest.partition(END)[2], encoding="utf-8")
