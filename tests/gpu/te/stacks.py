"""Which releases belong together on the GPU machine, beside a torch that is there already."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """Releases that are tested together.

    Attributes:
        transformer_engine: its release; core library, Python package and torch extension have the same.
        packages: megatron-core, Megatron Bridge and what these two bind to exact releases.
    """

    transformer_engine: str
    packages: tuple[str, ...]


#: By the release of Megatron Bridge. Transformer Engine is the one of Bridge's own container where that runs with the machine's
#: torch: from 2.13 on its core library needs cuBLAS 13.2 (`cublasLtGroupedMatrixLayoutInit_internal`), and torch 2.11 has 13.1.
STACKS = {
    "0.3.1": Stack(
        "2.11.0",
        (
            "megatron-core==0.16.1", "megatron-bridge==0.3.1", "transformers==4.57.3", "huggingface-hub==0.36.2",
            "hydra-core==1.3.2",
        ),
    ),
    "0.6.2": Stack(
        "2.12.0",
        (
            "megatron-core==0.19.2", "megatron-bridge==0.6.2", "transformers==5.12.1", "huggingface-hub==1.33.0",
            "hydra-core==1.3.4",
        ),
    ),
}  # fmt: skip

#: What both take: this project's own needs, NeMo-Run's, and those of the packages above. Packages that a machine for training
#: has anyway (numpy, pyarrow, psutil, pytest, rich, typer, jinja2, httpx, …) are left out; `install.py` names what is missing.
COMMON = (
    "msgspec==0.22.0", "isal==1.9.1", "nvtx==0.2.17", "omegaconf==2.3.1", "pydantic==2.14.3", "pydantic-core==2.50.4",
    "annotated-types==0.8.0", "typing-inspection==0.4.5", "tokenizers==0.22.2", "einops==0.8.2",
    "nemo_run==0.11.1", "torchx==0.7.0", "fiddle==0.3.1", "libcst==1.9.0", "graphviz==0.21", "catalogue==2.0.10",
    "invoke==2.2.1", "toml==0.10.2", "docstring_parser==0.18.0", "lazy-importer==0.1.0", "importlib_metadata==10.2.0",
)  # fmt: skip

#: Published as source only; pure Python. hydra-core and omegaconf bind it.
FROM_SOURCE = ("antlr4-python3-runtime==4.9.3",)
