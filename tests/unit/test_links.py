"""Every Markdown page of the tree: its links lead to files and headings that exist, and the named files and modules
exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import typer.main

from services.cli.__main__ import app

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("docs", "recipes", "services", "deploy", "examples")
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(page for folder in FOLDERS for page in (REPOSITORY / folder).rglob("*.md"))]
)
# Decisions and the changelog name files of their time.
PRESENT = [page for page in PAGES if page.parent.name != "adr" and page.name != "CHANGELOG.md"]
ROOTS = "services|recipes|docs|benchmarks|tests|examples|protos|deploy|rollmill"
PATH = re.compile(rf"(?<![\w./-])((?:{ROOTS})/[\w./*-]*)")
MEMBER = re.compile(rf"((?:{ROOTS})/[\w./-]*\.py):([A-Za-z_][\w.]*)")
MODULE = re.compile(r"(?<![\w./-])((?:services|recipes|benchmarks|tests|rollmill)(?:\.\w+)+)(?![\w/])")
# Names of a reader's own files, and of packages of the wire.
EXAMPLES = {"recipes/mine", "services.x", "rollmill.v1"}
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have, as repository hosts and the site build make them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    """The targets of a page's links that lead nowhere."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        destination = (page.parent / file).resolve() if file else page
        if destination.is_dir():
            destination /= "README.md"  # the page that the site shows for a folder
        if not destination.exists() or (anchor and anchor not in anchors(destination)):
            found.append(target)
    return found


def unknown_names(text: str, root: Path) -> list[str]:
    """Paths and dotted modules between backticks that do not exist below ``root``."""
    spans = re.findall(r"`([^`\n]+)`", text)
    paths = [path.rstrip(".") for span in spans for path in PATH.findall(span)]
    modules = [module for span in spans for module in MODULE.findall(span)]
    missing = [path for path in paths if not any(root.glob(path.rstrip("/")))]
    missing += [
        span for span in spans if (found := MEMBER.fullmatch(span)) and not has_member(root / found[1], found[2])
    ]
    missing += [module for module in modules if not is_defined(module, root)]
    return [name for name in missing if name not in EXAMPLES]


def has_member(file: Path, dotted: str) -> bool:
    """Whether a file has a class or function, or a class of it has a method. A file that is not there is told elsewhere."""
    if not file.is_file():
        return True
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in dotted.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


def is_defined(dotted: str, root: Path) -> bool:
    """Whether the name is a module or package, or is defined in the module that precedes its last part or its last two."""
    for depth in range(3):
        parts = dotted.split(".")
        module, rest = parts[: len(parts) - depth], parts[len(parts) - depth :]
        path = root.joinpath(*module)
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if not rest and (file.is_file() or path.is_dir()):
            return True
        if rest and file.is_file():
            text = file.read_text(encoding="utf-8")
            return all(re.search(rf"\b{re.escape(part)}\b", text) for part in rest)
    return False


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_paths_and_modules_that_are_named_exist(page: Path) -> None:
    assert unknown_names(page.read_text(encoding="utf-8"), REPOSITORY) == []


def test_every_page_of_the_documentation_is_linked_from_the_readme_or_the_index() -> None:
    """A page without a link is not found by its readers."""
    linked = {
        (source.parent / target.partition("#")[0]).resolve()
        for source in (REPOSITORY / "README.md", REPOSITORY / "docs" / "index.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", source.read_text(encoding="utf-8"))
    }
    assert [
        name(page) for page in (REPOSITORY / "docs").glob("*.md") if page not in linked | {page.with_name("index.md")}
    ] == []


def test_the_site_has_every_page_of_the_documentation() -> None:
    listed = set(re.findall(r"(?:docs|recipes)/[\w./-]+\.md", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = {name(page) for folder in ("docs", "docs/reference") for page in (REPOSITORY / folder).glob("*.md")}
    assert pages <= listed and all((REPOSITORY / page).is_file() for page in listed)


def test_every_decision_is_in_the_list_of_decisions() -> None:
    folder = REPOSITORY / "docs" / "adr"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in sorted(folder.glob("0*.md")) if f"]({page.name})" not in text] == []


def test_every_command_that_a_page_or_a_message_names_exists() -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    places = [*PRESENT, *(REPOSITORY / "services").rglob("*.py"), *(REPOSITORY / "recipes").rglob("*.yaml")]
    named = {
        (place.relative_to(REPOSITORY).as_posix(), command)
        for place in places
        for command in re.findall(r"(?:^|`)rollmill ([a-z]+)", place.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 100
    assert sorted((place, command) for place, command in named if command not in known) == []
