"""What one decode step of the built-in sampler takes, part by part: classes as they are, layers written out, drawing by kernels.

python benchmarks/decode.py              # on a GPU: benchmarks/results/decode-cuda.json, written after every part
python benchmarks/decode.py --compiled   # and the step that torch compiles, which takes minutes: decode-compiled-cuda.json
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import save
from step_gpu import save_model


@dataclass(frozen=True)
class Part:
    layers: bool = False  # written out
    drawing: bool = False  # by kernels
    compiled: bool = False


PARTS = {
    "layers and drawing of the classes": Part(),
    "layers written out": Part(layers=True),
    "drawing by kernels as well": Part(layers=True, drawing=True),
}
COMPILED = {"compiled": Part(compiled=True)}


def engine_of(model: Any, slots: int, columns: int, part: Part) -> Any:
    from opd.engines import calls
    from opd.engines.builtin import Engine
    from opd.engines.kinds import BuiltInSampler

    usual = calls.DecodeLayers.of, calls.fused_drawing
    if not part.layers:
        calls.DecodeLayers.of = lambda model, room: None  # type: ignore[method-assign]
    if not part.drawing:
        calls.fused_drawing = lambda device: None
    try:
        spec = BuiltInSampler(slots=slots, compile=part.compiled)
        return Engine(model.inference_copy(), spec, 2 * columns, merge_stop=model.stop_ids)
    finally:
        calls.DecodeLayers.of, calls.fused_drawing = usual  # type: ignore[method-assign]


def milliseconds(engine: Any, columns: int, count: int) -> float:
    """Of a step whose slots all hold about so many columns."""
    steps = engine.steps
    steps.column.fill_(columns - count // 2)
    steps.slot_settings.temperature.fill_(1.0)

    def decode(times: int) -> None:
        for _ in range(times):
            steps.decode(columns + count, False)

    decode(3)  # the first is recorded
    return round(clocked(engine.model.device, lambda: decode(count)) / count, 3)


def clocked(device: Any, call: Callable[[], None]) -> float:
    import torch

    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended))


def measure(model: Any, slots: int, part: Part, given: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    engine = engine_of(model, slots, given.columns, part)
    found = {
        "milliseconds": milliseconds(engine, given.columns, given.steps),
        "written out": engine.steps.writes_out,
        "seconds with preparation": round(time.perf_counter() - begun, 1),
    }
    del engine
    gc.collect()  # its graphs and cache
    return found


def main() -> None:
    import torch

    from opd.models import load_model

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "135M"])
    parser.add_argument("--slots", nargs="+", type=int, default=[64])
    parser.add_argument("--columns", type=int, default=384)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compiled", action="store_true", help="also the step that torch compiles")
    parser.add_argument("--models", type=Path, help="where random models are kept; default: made anew")
    given = parser.parse_args()
    on_gpu = given.device != "cpu"
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    report: dict[str, Any] = {"device": name, "columns": given.columns, "steps": {}}
    with tempfile.TemporaryDirectory() as directory:
        for shape in given.shapes:
            where = save_model(shape, given.models or Path(directory), given.device)
            model = load_model(where, dtype="bfloat16" if on_gpu else "float32", device=given.device)
            for slots in given.slots:
                found = report["steps"][f"{shape}, {slots} slots"] = {}
                for part, how in (PARTS | (COMPILED if given.compiled else {})).items():
                    found[part] = measure(model, slots, how, given)
                    print(shape, slots, part, found[part], flush=True)
                    save(f"decode-{'compiled-' * given.compiled}{'cuda' if on_gpu else 'cpu'}.json", report)
            del model


if __name__ == "__main__":
    main()
