"""Makes the picture of docs/simulate.md: runs the command that the page shows and photographs the page that it writes.

    python scripts/simulate_picture.py [--chromium PATH]

Invariant: the same policies give the same picture, and nothing is loaded from a network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "simulate.png"
COMMAND = "simulate --policy balanced,load_aware,random --sources 32 --targets 128 --idle 1 --rest 0.5"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync "
    "--hide-scrollbars --virtual-time-budget=5000 --window-size=900,1000"
)
MOST_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description="Make docs/images/simulate.png.")
    parser.add_argument("--chromium", default=next(filter(shutil.which, BROWSERS), None), help="the browser to use")
    browser = parser.parse_args().chromium
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed; name one with --chromium", file=sys.stderr)
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "simulate.html"
        simulate = [sys.executable, "-c", "from mx_common.cli import main; main()", *COMMAND.split(), "--plot", str(page)]
        subprocess.run(simulate, check=True, timeout=MOST_SECONDS)
        profile, shot = f"--user-data-dir={folder}/profile", f"--screenshot={PICTURE}"
        subprocess.run([browser, *QUIET.split(), profile, shot, page.as_uri()], check=True, timeout=MOST_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
