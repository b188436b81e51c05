"""Our operators in the places where others call theirs: ``transformers`` and ``sglang``.

Each module is imported on its own; none of them is by ``import sparse_mla``.
"""
