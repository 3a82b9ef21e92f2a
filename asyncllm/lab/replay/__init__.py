"""Replay: the real scheduler on a recorded trace, to check it or to simulate other settings.

Requests need no recording to be simulated: ``tools.bench_policies`` of a checkout has those of
published logs, and others made up to be hard on a scheduler.

::

    trace = Trace.read("run.trace")  # asyncllm.engine.recording.trace_file
    replayed = verify(trace)  # asyncllm.lab.replay.verify
    assert replayed.mismatch is None
    figures = simulate(replayed, Variant.parse("budget=1024"))  # asyncllm.lab.replay.simulate
"""
