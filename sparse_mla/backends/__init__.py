"""One module a backend, each with ``NAME``, ``available()``, ``refusal(problem)`` and ``run(problem)``."""
