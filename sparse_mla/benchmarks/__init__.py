"""Benchmarks: shapes as data, one runner, peers as plug-ins, a report, a regression gate.

``sparse-mla bench`` is the way in. Nothing of the library imports this; figures are measured on
this machine at the time of asking, or read from a results file that such a run wrote.
"""
