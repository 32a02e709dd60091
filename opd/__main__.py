"""`python -m opd`, which is what launchers of several processes call: torchrun -m opd run X."""

from opd.cli import main

if __name__ == "__main__":
    main()
