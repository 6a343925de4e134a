"""Makes a page one file that needs no network: its template, our scripts and style, Plotly and the pictures' data in it.

Plotly comes out of its Python package and is packed, as is the data: the browser unpacks both (every browser since May 2023
can). Knows nothing of what a page shows.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isal import igzip
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bridge_profiling import __version__
from bridge_profiling.errors import ProfilingConfigError
from bridge_profiling.report.json import finite

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, scripts: Sequence[str], data: Mapping[str, Any], **values: Any) -> str:
    """The page's text.

    Args:
        template: its name.
        scripts: our own that it needs, in the order in which they stand on it.
        data: what they draw.
        values: what the template shows. Names of kernels and ranges in it stay text.

    Raises:
        ModuleNotFoundError: Plotly is not installed.
    """
    environment = Environment(
        loader=PackageLoader("bridge_profiling.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        version=__version__,
        style=_own("page.css"),
        script=_own(*scripts),
        plotly=_packed(plotly_script()),
        data=_packed(json.dumps(finite(data), separators=(",", ":"), allow_nan=False).encode()),
        **values,
    )


def plotly_script() -> bytes:
    """Plotly's own script, out of its Python package, which is not imported for it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("plotly is not installed", name="plotly")
    return (Path(found.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def write(output: Path, text: str) -> None:
    """Write a page. It is there when it is whole.

    Args:
        output: the file.
        text: what `render` gave.

    Raises:
        ProfilingConfigError: the file cannot be written.
    """
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, output)
    except OSError as error:
        raise ProfilingConfigError(
            f"{output} cannot be written", why=error.strerror or str(error), instead="Name another file with -o"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _own(*names: str) -> Markup:
    """Our own scripts or styles as they are."""
    return Markup("\n".join((_TEMPLATES / name).read_text(encoding="utf-8") for name in names))


def _packed(content: bytes) -> Markup:
    """Gzip, as text that no browser and no template takes for markup."""
    return Markup(base64.b64encode(igzip.compress(content, 3)).decode())
