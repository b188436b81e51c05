"""``python -m sparse_mla``: the command ``sparse-mla`` where no script is installed for it."""

from .cli import main

if __name__ == "__main__":
    main()
