"""What DeepSpeed measures itself: its FLOPs profiler, its wall-clock breakdown, its autotuning. Read, never switched on or off.

Steps are numbered alike: DeepSpeed's `global_steps` are the complete ones, so its `profile_step=5` is iteration 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge_profiling.config import Window


class Measurements:
    """Settings and results of one engine's own measurements.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._flops: dict[str, object] | None = None
        self._iterations: list[int] = []
        self._timers_ms: dict[str, list[float | None]] = {}

    def settings(self) -> dict[str, object]:
        """What they are set to, and what they have found until now."""
        engine = self._engine
        autotuning = engine._config.autotuning_config
        return {
            "flops_profiler": {
                "enabled": bool(engine.flops_profiler_enabled()),
                "profile_step": engine.flops_profiler_profile_step(),
                "result": self._flops,
            },
            "wall_clock_breakdown": {
                "enabled": bool(engine.wall_clock_breakdown()),
                "iteration": self._iterations,
                "timers_ms": self._timers_ms,
            },
            "autotuning": {
                "enabled": bool(autotuning.enabled),
                "start_profile_step": autotuning.start_profile_step,
                "end_profile_step": autotuning.end_profile_step,
                "metric": autotuning.metric,
            },
        }

    def notes(self, window: Window) -> list[str]:
        """What a reader of this window should know of them."""
        engine, found = self._engine, []
        step = engine.flops_profiler_profile_step()
        if engine.flops_profiler_enabled() and step in window:
            setting = "autotuning.start_profile_step" if engine.autotuning_enabled() else "flops_profiler.profile_step"
            found.append(
                f"DeepSpeed's FLOPs profiler runs in iteration {step}, inside the window {window}: on rank 0 it waits for the"
                f" device around every module, so that iteration is slower than others. Set {setting} outside the window"
            )
        if engine.wall_clock_breakdown():
            cause = ", which the FLOPs profiler switches on" if engine.flops_profiler_enabled() else ""
            found.append(
                f"wall_clock_breakdown is on{cause}: DeepSpeed waits for the device when it logs its timers, every iteration."
                " Switch it off for a capture of the training as it is"
            )
        end = engine.autotuning_end_profile_step()
        if engine.autotuning_enabled() and window.last >= end:
            found.append(
                f"DeepSpeed's autotuning ends the process in iteration {end}, before the window {window} is complete."
                f" Move the window to {engine.autotuning_start_profile_step()}-{end}"
            )
        return found

    def watch(self) -> Callable[[], None]:
        """Keep what the FLOPs profiler has counted before it forgets. Returns what ends that."""
        profiler = getattr(self._engine, "flops_profiler", None)
        if profiler is None:
            return lambda: None
        forget = profiler.end_profile

        def end_profile() -> None:
            if profiler.started:
                self._flops = {
                    # The engine has counted this step already.
                    "iteration": self._engine.global_steps - 1,
                    "forward_flops": int(profiler.get_total_flops()),
                    "forward_macs": int(profiler.get_total_macs()),
                    "parameters": int(profiler.get_total_params()),
                    # Of the root module it adds up no time, but the clock.
                    "timers_ms": {
                        name: round(timer.elapsed(reset=False), 3) for name, timer in self._engine.timers.get_timers().items()
                    },
                }
            forget()

        profiler.end_profile = end_profile
        return lambda: delattr(profiler, "end_profile")

    def read_timers(self, iteration: int) -> None:
        """The wall-clock breakdown of the iteration that ends, in milliseconds, where DeepSpeed has one."""
        timers = self._engine.get_wall_clock_timers() if self._engine.wall_clock_breakdown() else {}
        if not timers or (self._iterations and self._iterations[-1] == iteration):
            return
        self._iterations.append(iteration)
        for name, milliseconds in timers.items():
            self._timers_ms.setdefault(name, []).append(round(milliseconds, 3))
