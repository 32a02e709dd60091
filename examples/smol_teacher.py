"""Makes `smol/words`: trains the recipe `smol-teacher` (on a GPU, four minutes) and packs its adapter in bfloat16.

python examples/smol_teacher.py                 # writes opd/models/smol/words
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import opd
from opd.models.load import CONFIG, WEIGHTS_FILE


def pack(run: opd.Run, to: Path) -> None:
    """The adapter of a run, with the built-in name of its base and what the run measured."""
    to.mkdir(parents=True, exist_ok=True)
    tensors = load_file(run.model / "adapter" / WEIGHTS_FILE)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in sorted(tensors.items())}, to / WEIGHTS_FILE)
    config = json.loads((run.model / "adapter" / CONFIG).read_text(encoding="utf-8"))
    config |= {"base_model_name_or_path": "smol"}
    (to / CONFIG).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    (evals,) = (stage["evals"] for stage in run.summary["stages"])
    (to / "manifest.json").write_text(
        json.dumps({"recipe": "smol-teacher", "evals": evals}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(opd.__file__).parent / "models" / "smol" / "words"
    pack(opd.run("smol-teacher", quiet=False), target)
    print(f"wrote {target}")
