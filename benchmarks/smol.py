"""SmolLM2-135M-Instruct learns: from a teacher (the recipe `smol`, CPU or GPU), or by GRPO (`smol-grpo`, GPU).

    python benchmarks/smol.py [smol | smol-grpo] [--run DIRECTORY]      # --run: of a run that is there already

Writes benchmarks/results/RECIPE-DEVICE.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from runs import read_run, save

import opd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="smol", choices=["smol", "smol-grpo"])
    parser.add_argument("--run", type=Path, help="directory of a finished run of the recipe")
    args = parser.parse_args()
    directory = args.run or opd.run(args.recipe, out=Path(tempfile.mkdtemp()) / args.recipe).directory
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = read_run(directory)
    print(f"{found['curve'][0][1]:.1%} -> {found['curve'][-1][1]:.1%} after {found['curve'][-1][0]:,} sampled tokens")
    name = "cuda" if torch.cuda.is_available() else "cpu"
    save(f"{args.recipe}-{name}.json", {"recipe": args.recipe, "device": device} | found)


if __name__ == "__main__":
    main()
