"""One module a backend: ``NAME``, ``available()``, ``refusal(problem)``, ``run(problem)``."""
