"""Makes a picture of a command's output: `make_picture.py docs/images/demo.txt docs/images/demo.png`. Needs Chromium.

The text is shown as a terminal shows it; README and docs use the picture, and the text stays beside it.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LINE, LETTER, MARGIN = 19, 8.5, 24
"""Pixels: the height of a line, the width of a letter, the space around the text."""
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #16181d; color: #d7dae0; }}
pre {{ margin: 0; padding: {margin}px; font: 14px/{line}px "DejaVu Sans Mono", "JetBrains Mono", monospace; }}
b {{ color: #8fd18f; font-weight: normal; }} i {{ color: #e6a07c; font-style: normal; }}
s {{ display: inline-block; width: 1ch; overflow: hidden; text-decoration: none; vertical-align: top; }}
</style><pre>{text}</pre>"""


def main(source: Path, target: Path) -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("Chromium is needed: apt-get install chromium.", file=sys.stderr)
        return 1
    text = html.escape(source.read_text(encoding="utf-8").rstrip())
    marked = text.replace("    right:", "    <b>right</b>:").replace("    wrong:", "    <i>wrong</i>:")
    # Dots come from another font, whose letters are wider: a curve would run past its axis.
    marked = re.sub("[\u2800-\u28ff]", r"<s>\g<0></s>", marked)
    lines = source.read_text(encoding="utf-8").rstrip().split("\n")
    width, height = round(LETTER * max(map(len, lines))) + 2 * MARGIN, LINE * len(lines) + 2 * MARGIN
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(text=marked, margin=MARGIN, line=LINE), encoding="utf-8")
        flags = (
            "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
        )
        words = [*flags.split(), f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
        words += ["--hide-scrollbars", f"--screenshot={target.resolve()}", page.as_uri()]
        subprocess.run([browser, *words], check=True, capture_output=True, timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
