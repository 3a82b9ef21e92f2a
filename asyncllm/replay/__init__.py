"""Replay: the real scheduler on a recorded trace, to check it or to simulate other settings.

::

    replayed = verify(Trace.read("run.trace"))  # asyncllm.replay.verify, .trace_file
    assert replayed.mismatch is None
    figures = simulate(replayed, Variant.parse("budget=1024"))  # .simulate, .variants
"""
