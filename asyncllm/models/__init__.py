"""8 The models: one small file per architecture, and what reads their folders.

``spec``, ``config``, ``registry`` and ``hub`` import without torch; ``loader`` builds and fills a
model. The top of ``registry`` tells how to add an architecture.
"""
