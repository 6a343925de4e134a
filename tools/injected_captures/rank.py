"""One rank of one case: the project's own training with the case's plant in its loop. `make.py` starts it.

    torchrun --nproc-per-node 2 tools/injected_captures/rank.py --case data_loading_2

Where it stands among the ranks, the environment says as torchrun does; it writes into the directory it is started in.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from bridge_profiling.capture.signals import unwind_on
from bridge_profiling.nsys.launch import report_exit_code
from launch.pretrain import build_config
from tests.planted.cases import CASES, RECIPE

#: What makes a case run on a CPU in seconds: the plumbing is the same, the numbers mean nothing.
CPU_SETTINGS = (
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.seq_length=32",
    "model.vocab_size=128",
    "model.bf16=false",
)
CPU_PARAMETERS: dict[str, Any] = {
    "matrix": 128, "mebibytes": 1, "elements": 4096, "per_microbatch": 6, "sleep_ms_per_sample": 1, "busy_ms_per_module": 1,
    "mebibytes_per_microbatch": 1,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True, choices=sorted(CASES))
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    case, rank = CASES[options.case], int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("megatron").setLevel(logging.WARNING)

    from recipes.megatron import train
    from tools.injected_captures.plants import PLANTS

    config = build_config(RECIPE, overrides=[*case.settings, *(CPU_SETTINGS if options.cpu else ())])
    parameters = {name: value for name, value in (case.plant or {}).items() if name != "kind"}
    if options.cpu:
        parameters |= {name: CPU_PARAMETERS[name] for name in parameters if name in CPU_PARAMETERS}
    measured: dict[str, Any] = {}
    if case.plant is not None:
        loop = PLANTS[case.plant["kind"]]
        train.Loop = partial(loop, parameters=parameters, here=rank in case.planted_ranks, measured=measured)
    with unwind_on(signal.SIGTERM, replace=True), report_exit_code():
        # A rank that nsys profiles starts again here, and comes back to this line.
        train.pretrain(config, may_restart=True)
    if rank == (case.planted_ranks or [0])[0]:
        record = {"case": case.name, "rank": rank, "plant": case.plant, "environment": case.environment, "measured": measured}
        Path("planted.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
