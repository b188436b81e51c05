"""``python -m sparse_mla``: the command ``sparse-mla`` where no script is installed for it."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.argv[0] = "sparse-mla"  # what help, and a benchmark's results, say of how it was called
    main()
