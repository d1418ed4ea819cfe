"""The site: `make docs` writes it to build/site, `make lint` builds it too.

It has the repository's own tree, README.md in front, so the same relative links work here and where the repository is hosted. Every warning
fails the build: a page that is not in NAVIGATION, a link or an anchor that leads nowhere, a name that a module does not offer.

A page may say `<!-- signatures: mx_common.selection -->`; on the site the module's public names follow there.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import signatures  # noqa: E402

# a page is one line
NAVIGATION = {
    "How to": [
        "docs/vllm",
        "docs/sglang",
        "docs/trainers",
        "docs/operating",
        "docs/top",
        "docs/gate",
        "docs/report",
        "docs/metrics",
        "docs/simulate",
    ],
    "Concepts": [
        "docs/architecture",
        "docs/selection",
        "docs/refit",
        "docs/new-engine",
    ],
    "Reference": [
        "docs/configuration",
        "docs/records",
        "docs/engines",
        "docs/python",
        "docs/python-adapters",
        "benchmarks/RESULTS",
    ],
}

project = "mx-adapters"
html_title = project

extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "benchmarks/*.md"]
# not walked
exclude_patterns = [".*", "build", "tests", "mx_common", "adapters", "patches", "examples"]
# anchors are those of the repository's host
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
# a block that names no language is none
highlight_language = "none"

html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_use_index = False


def with_navigation_and_signatures(app, docname, source):
    """Puts in what pages do not hold themselves, which is all that only the site shows."""
    source[0] = re.sub(
        r"^<!-- signatures: (\S+)(.*?) -->$", lambda m: signatures.of_module(m[1], m[2].split()), source[0], flags=re.MULTILINE
    )
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def index_beside_readme(app, error):
    """A folder is opened at index.html."""
    if not error:
        shutil.copyfile(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app):
    app.connect("source-read", with_navigation_and_signatures)
    app.connect("build-finished", index_beside_readme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
