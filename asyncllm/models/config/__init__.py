"""config.json, typed: one struct per family, with the family's own defaults.

Field names are those on disk; other fields there are ignored. Both spellings of rotary settings are
understood: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``. Unsupported values raise
ModelError on construction, or msgspec's ValidationError when decoding. Imports no torch.
"""
