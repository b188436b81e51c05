"""Cases as data, comparison with a stated tolerance, poisoned and guarded buffers, yardsticks.

Everything works on tensors of any device, so that one set of cases serves every backend.
"""

from __future__ import annotations

from .cases import (
    ACCURACY_CASES,
    CASES,
    VALUE_ONE_CASES,
    Case,
    Inputs,
    allocate_outputs,
    make_inputs,
    make_problem,
)
from .compare import CPU_BFLOAT16, CPU_FLOAT32, EXACT, Errors, Tolerance, compare, expected, measure
from .emulation import fp8_p_emulation
from .poison import Guarded, guarded_like, poison_unselected, poisoned_

__all__ = [
    "ACCURACY_CASES",
    "CASES",
    "CPU_BFLOAT16",
    "CPU_FLOAT32",
    "EXACT",
    "VALUE_ONE_CASES",
    "Case",
    "Errors",
    "Guarded",
    "Inputs",
    "Tolerance",
    "allocate_outputs",
    "compare",
    "expected",
    "fp8_p_emulation",
    "guarded_like",
    "make_inputs",
    "make_problem",
    "measure",
    "poison_unselected",
    "poisoned_",
]
