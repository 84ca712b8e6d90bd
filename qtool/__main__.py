"""``python -m qtool`` is the command line, also where only a module's name is taken: ``torchrun -m qtool train …``."""

from qtool.cli import main

if __name__ == "__main__":
    main()
