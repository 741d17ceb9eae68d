"""Puts the Markdown pages of the whole repository into the documentation site, with the files that they link to.

A hook of MkDocs (`mkdocs.yml`). MkDocs reads one folder; pages here link to recipes, code and each other by path, as a
repository host shows them. Each page keeps its path from the repository's root, so the same links work in both places.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "recipes", "services", "deploy", "examples")
LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the repository's pages and what they link to."""
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    linked = {target for page in pages for target in _targets(page) if target.is_file() and target.suffix != ".md"}
    added = [_file(path, config) for path in sorted({*pages, *linked})]
    # The theme's own files stay.
    theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*theme, *added])


def _file(path: Path, config: MkDocsConfig) -> File:
    return File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path))


def _targets(page: Path) -> list[Path]:
    found = [match[1] for match in LINK.findall(page.read_text(encoding="utf-8"))]
    return [(page.parent / target).resolve() for target in found if "://" not in target]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to folders into links to their README, or into plain text where there is none."""
    folder = ROOT / Path(page.file.src_uri).parent

    def resolved(match: re.Match[str]) -> str:
        target = folder / match[2]
        if "://" in match[2] or not target.is_dir():
            return match[0]
        for name in ("README.md", "index.md"):
            if (target / name).is_file():
                return f"{match[1]}{match[2].rstrip('/')}/{name}{match[3]}"
        raise ValueError(f"{page.file.src_uri} links to the folder {match[2]}, which has no README.md: link to a file")

    return LINK.sub(resolved, markdown)
