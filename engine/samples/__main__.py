"""`python -m engine.samples FOLDER`: the samples of a run as a page, in a file or served."""

import argparse
import contextlib
import html
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.console import command_line, display_path, say
from engine.errors import ConfigError, EngineError
from engine.samples.sample_files import PAGE, SampleFolder, find_samples
from engine.samples.viewer import page_of
from engine.storage.filesystem import is_remote, write_text


@command_line()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.samples",
        description="Show what a run's policy wrote while it was trained: prompts, completions, "
        "rewards, and what each token contributed. Writes one HTML page that needs no network.",
        epilog="exit status: 0; 1 without readable samples; 2 wrong usage",
    )
    parser.add_argument(
        "folder", metavar="FOLDER",
        help="a run's folder, its `rollouts`, or an artifact `rl`; may be s3://…",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="FILE", help=f"where to write it (default: {PAGE} in the samples' folder)"
    )
    parser.add_argument(
        "--serve", metavar="PORT", type=int, nargs="?", const=8266,
        help="serve it at http://127.0.0.1:PORT/ (8266), rebuilt at each visit",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    folder = find_samples(options.folder)
    if options.serve is not None:
        _serve(folder, options.serve)
    else:
        say(display_path(_write(folder, options.html)))
    return 0


def _write(folder: SampleFolder, target: str | None) -> Path:
    """Write the page, beside the samples of this machine unless `target` says where."""
    here = Path.cwd() if is_remote(folder.uri) else Path(folder.uri)
    path = Path(target).expanduser() if target else here / PAGE
    write_text(path, page_of(folder), "choose another file with --html")
    return path


def _serve(folder: SampleFolder, port: int) -> None:
    """Serve the page on this machine alone until Ctrl-C; it is made again for each visit."""
    try:
        server = make_server(folder, port)
    except OSError as error:
        raise ConfigError(
            f"--serve {port}: {error.strerror or error}; choose another port, or 0 for a free one"
        ) from error
    with contextlib.closing(server.socket):
        say(f"http://127.0.0.1:{server.server_port}/  (reload to see new steps; Ctrl-C ends)")
        server.serve_forever()


def make_server(folder: SampleFolder, port: int) -> ThreadingHTTPServer:
    """Return a server of the page on 127.0.0.1; port 0 takes a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            try:
                status, page = 200, page_of(folder)
            except EngineError as error:
                status, page = 503, f"<!doctype html><p>{html.escape(str(error))}</p>"
            content = page.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of visits."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    sys.exit(main())
