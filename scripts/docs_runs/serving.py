"""docs/serving.md: a tiny model is served and asked by the page's program; its other commands are read, in dry runs."""

from __future__ import annotations

import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from scripts.docs_runs.common import DocumentError, Done, exchange, expect, fences, items, key, page_of, start


def run() -> Done:
    """Serve by the first command, ask, and end the server; read the other commands, also docs/evaluation.md's."""
    from PIL import Image

    from tests.support.families import families
    from tests.support.serving import ServerProcess

    page, other = page_of("serving.md"), page_of("evaluation.md")
    families()["qwen2_5_vl"].make(Path("runs/my_run/hf"))
    Image.new("RGB", (56, 56), (200, 120, 40)).save("cat.png")
    Path("pictures").mkdir()
    Path("key.txt").write_text("a-key\n", encoding="utf-8")
    first, second = items(fences(page, "bash")[0])
    third = next(item for fence in fences(other, "bash") for item in items(fence) if item.startswith("mindspeed-mm"))
    python = fences(page, "python")[0]
    server = ServerProcess(*map(Path, shlex.split(first)[2:]), Path("server"), "--max-new-tokens", 2)
    try:
        text = exchange(python.text, {":8000/": f":{server.port}/"}, page)
        with redirect_stdout(StringIO()) as output:
            exec(compile(text, python.place, "exec"), {"__name__": python.place})
        if not output.getvalue().strip() or server.stop():
            raise DocumentError(f"{page.name}: no answer, or no end:\n{server.log.read_text(encoding='utf-8')}")
    finally:
        server.close()
    for place, command in ((page, second), (other, third)):
        expect(start(f"{command} --dry-run", place), ['"accepted": true', '"name": "my_run"'], place)
    return {key(page, item) for item in (first, second, python.text)} | {key(other, third)}
