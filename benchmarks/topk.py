"""What a divergence on part of the vocabulary costs beside the full one, value and gradient: tiles of the CUDA kernels, and torch.

python benchmarks/topk.py            # on a GPU: benchmarks/results/topk-cuda.json
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from runs import save


def main() -> None:
    import torch

    from opd.divergences import Projection, divergence

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if given.device != "cpu" else torch.float32

    def head() -> Projection:
        hidden, weight = (
            torch.randn(rows, given.width, device=given.device) for rows in (given.tokens, given.vocabulary)
        )
        return Projection(hidden.to(dtype).requires_grad_(), (weight / 32).to(dtype).requires_grad_())

    student, teacher = head(), head()

    def once(**options: Any) -> Any:
        found = divergence("reverse_kl", student, teacher, merge=((1, 2),), **options)
        found.loss.backward()
        student.hidden.grad = student.weight.grad = None
        return found

    def seconds(**options: Any) -> float:
        once(**options)
        _wait(given.device)
        begun = time.perf_counter()
        for _ in range(given.repeats):
            once(**options)
        _wait(given.device)
        return (time.perf_counter() - begun) / given.repeats

    def on_device(**options: Any) -> float | None:
        """Milliseconds of the kernels themselves, of one call: the rest of its time the device waits for the host."""
        if given.device == "cpu":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            once(**options)
            torch.cuda.synchronize()
        return round(sum(event.self_device_time_total for event in profile.key_averages()) / 1000, 2)

    few = {"support": "topk", "k": min(100, given.vocabulary // 4)}
    milliseconds = {
        "full vocabulary": seconds(),
        "top-k of the teacher": seconds(**few),
        "union of both sides' top-k": seconds(**few, side="union"),
        "top-k of the teacher, in torch": seconds(**few, backend="chunked"),
    }
    device = {"full vocabulary": on_device(), "top-k of the teacher": on_device(**few)}
    values = [once(**few, backend=backend).value for backend in ("auto", "chunked")]
    report = {
        "device": torch.cuda.get_device_name() if given.device != "cpu" else "cpu",
        "settings": {key: getattr(given, key) for key in ("tokens", "vocabulary", "width")} | {"k": few["k"]},
        "milliseconds": {name: round(1000 * value, 2) for name, value in milliseconds.items()},
        "milliseconds of kernels alone": device,
        "largest difference of the values": float((values[0] - values[1]).abs().max()),
    }
    print(report["milliseconds"])
    save(f"topk-{'cpu' if given.device == 'cpu' else 'cuda'}.json", report)


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
