"""The catalogue of methods, and `explain`, which runs one by name.

An entry says what a method gives (scope, sign, unit), what it costs, what it needs and where it comes from; the code
behind it is imported when it is used, so that the catalogue can be read without torch.
"""

from __future__ import annotations

from attndiag.catalog.entries import CATALOG
from attndiag.catalog.record import Method, UnknownMethodError, UnknownParameterError, catalogue
from attndiag.catalog.running import explain, method_named, work_of

__all__ = [
    "CATALOG",
    "Method",
    "UnknownMethodError",
    "UnknownParameterError",
    "catalogue",
    "explain",
    "method_named",
    "work_of",
]
