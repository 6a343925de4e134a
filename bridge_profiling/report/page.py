"""A view as one HTML file that needs no network: the template, our scripts and style, Plotly and the figures' data.

Plotly comes from its Python package. It and the data are compressed; every browser since May 2023 can decompress them.
"""

from __future__ import annotations

import base64
import importlib.util
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from isal import igzip
from jinja2 import Environment, FileSystemBytecodeCache, PackageLoader, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from bridge_profiling import __version__
from bridge_profiling.common.atomic import write_atomically
from bridge_profiling.common.errors import ProfilingConfigError, require
from bridge_profiling.common.printable import printable
from bridge_profiling.report.documents import as_text
from bridge_profiling.report.figures import COLORS, KIND_NAMES
from bridge_profiling.report.views import PageView
from bridge_profiling.report.words import sentence
from bridge_profiling.traces.files import is_capture

_TEMPLATES = Path(__file__).parent / "templates"

_ANOTHER = "Name another file with -o"

#: In the order in which the page runs them.
_SCRIPTS = ("figures.js", "timeline.js", "tables.js", "perfetto.js", "page.js")


def write_page(view: PageView, output: Path) -> None:
    """Write a page; see `write_output`."""
    text = render(view)
    write_output(output, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_output(output: Path, write: Callable[[Path], object]) -> None:
    """Write a file of the user's atomically: `write` fills a temporary file.

    Raises:
        ProfilingConfigError: the file cannot be written, or is a capture.
    """
    require(
        not (output.exists() and is_capture(output)), f"{output} is a capture", why="it would be replaced", instead=_ANOTHER
    )
    try:
        write_atomically(output, write)
    except OSError as error:
        raise ProfilingConfigError(f"{output} cannot be written", why=error.strerror or str(error), instead=_ANOTHER) from error


class _CompiledTemplates(FileSystemBytecodeCache):
    """Keeps compiled templates where Python keeps this package's compiled modules: compiling takes a third of a small page."""

    def __init__(self) -> None:
        own = Path(__file__).stat().st_mtime_ns  # has the environment's options
        folder = Path(importlib.util.cache_from_source(__file__)).parent
        super().__init__(str(folder), f"%s.jinja-{version('jinja2')}-{own}")

    def load_bytecode(self, bucket: Bucket) -> None:
        try:
            super().load_bytecode(bucket)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):  # damaged
            bucket.reset()

    def dump_bytecode(self, bucket: Bucket) -> None:
        if not sys.dont_write_bytecode:
            with suppress(OSError):  # a page needs no place for it
                super().dump_bytecode(bucket)


def render(view: PageView) -> str:
    """The page's text. Names of kernels and ranges in it stay text.

    Raises:
        ModuleNotFoundError: Plotly is not installed.
    """
    environment = Environment(
        loader=PackageLoader("bridge_profiling.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_safe,
        bytecode_cache=_CompiledTemplates(),
    )
    data = {"figures": view.figures, "timeline": view.timeline, "colors": COLORS, "kindNames": KIND_NAMES}
    return environment.get_template("page.html.jinja").render(
        view=view,
        opened=view.opened,
        sentence=sentence,
        version=__version__,
        style=_own("page.css"),
        script=_own(*_SCRIPTS),
        plotly=_packed(_plotly()),
        data=_packed(as_text(data, separators=(",", ":")).encode()),
    )


def _safe(value: object) -> object:
    """Of each value that the template prints: names without characters that reorder or cut a line."""
    return printable(value, lines=True) if isinstance(value, str) and not isinstance(value, Markup) else value


def _plotly() -> bytes:
    """Plotly's script, from its Python package, which is not imported."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def _own(*names: str) -> Markup:
    return Markup("\n".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in names))


def _packed(content: bytes) -> Markup:
    """Gzip as base64, which no browser and no template reads as markup."""
    return Markup(base64.b64encode(igzip.compress(content, 3)).decode())
