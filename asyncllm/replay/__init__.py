"""Replay: the real scheduler on a recorded trace, to check it or to simulate other settings.

Requests need no recording to be simulated: ``load`` has those of published logs (``request_log``)
and of loads made up (``hostile``), ``bounds`` what no scheduler can beat.

::

    replayed = verify(Trace.read("run.trace"))  # asyncllm.replay.verify, .trace_file
    assert replayed.mismatch is None
    figures = simulate(replayed, Variant.parse("budget=1024"))  # .simulate, .variants
"""
