"""Replay: the real scheduler on a recorded trace, to check it or to ask what would have been.

::

    replayed = verify(Trace.read("run.trace"))  # asyncllm.replay.verify, .engine.trace_file
    assert replayed.mismatch is None
    figures = simulate(replayed, Variant.parse("budget=1024"))  # .simulate, .variants
"""
