"""Write docs/images: screenshots of the HTML report of a profile.

    graphllm profile demo --prompt-tokens 128 -n 64 -t 2 -o report.json
    python docs/make_screenshots.py report.json

Needs a Chromium (Debian's chromium-headless-shell). Text is rendered in the machine's own font.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from browser import Browser, Page  # noqa: E402

from graphllm.profiler.html import render_page  # noqa: E402

FOLDER = ROOT / "docs" / "images"
WIDTH, NARROW = 1120, 380  # pixels
MAX_BYTES = 200_000  # of a picture


def capture(shown: Page, name: str, top: str, bottom: str) -> None:
    """Save a picture from the top of one element to the bottom of another."""
    ends = (f"document.querySelector('{s}').getBoundingClientRect()" for s in (top, bottom))
    first, last = shown.evaluate("[{}.top, {}.bottom]".format(*ends))
    above = 60 if first > 60 else first  # the sticky bar
    shown.resize(shown.width, round(last - first + above + 16))
    shown.evaluate(f"scrollBy({{top: {first - above}, behavior: 'instant'}})")
    shown.settle()
    picture = quantize_colours(shown, shown.screenshot())
    if len(picture) > MAX_BYTES:
        raise SystemExit(f"{name}: {len(picture)} bytes, more than {MAX_BYTES}")
    (FOLDER / name).write_bytes(picture)
    print(f"{name}: {len(picture)} bytes")


PIXELS = """(async () => {
    const bitmap = await createImageBitmap(new Blob([Uint8Array.fromBase64("PICTURE")]));
    const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d");
    context.drawImage(bitmap, 0, 0);
    const { data } = context.getImageData(0, 0, bitmap.width, bitmap.height);
    return [bitmap.height, bitmap.width, new Uint8Array(data).toBase64()];
})()"""


def quantize_colours(shown: Page, picture: bytes) -> bytes:
    """Return the PNG with a palette of 256 colours, about a third of its size.

    The palette is chosen greedily: the next colour is the one with the largest squared distance to
    the palette, weighted by the square root of its number of pixels.
    """
    text = base64.b64encode(picture).decode()
    height, width, data = shown.evaluate(PIXELS.replace("PICTURE", text))
    pixels = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height * width, 4)[:, :3]
    colours, which, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    chosen, error = [int(np.argmax(counts))], np.full(len(colours), np.inf)
    nearest = np.zeros(len(colours), np.uint8)  # index in the palette
    while len(chosen) <= 256:
        distance = ((colours.astype(int) - colours[chosen[-1]]) ** 2).sum(-1)  # [colours]
        nearest[distance < error] = len(chosen) - 1
        error = np.minimum(error, distance)
        chosen.append(int(np.argmax(error * np.sqrt(counts))))
    palette, indices = colours[chosen[:256]], nearest[which.ravel()]
    rows = np.zeros((height, 1 + width), np.uint8)  # each row starts with its filter type, 0
    rows[:, 1:] = indices.reshape(height, width)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def main(profile: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder) / "report.html"
        path.write_text(render_page(json.loads(profile.read_text("utf-8"))), "utf-8")
        for dark in (False, True):
            shown = browser.open(path, width=WIDTH, dark=dark)
            capture(shown, f"report-{'dark' if dark else 'light'}.png", "#head", ".pair")
        shown = browser.open(path, width=WIDTH)
        shown.evaluate("document.querySelector('.profile tbody .key').click()")
        capture(shown, "report-steps.png", "#table", "#table")
        capture(shown, "report-timeline.png", "#timeline", "#placement")
        narrow = browser.open(path, width=NARROW, dark=True)
        capture(narrow, "report-narrow.png", "#roofline", "#heat")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
