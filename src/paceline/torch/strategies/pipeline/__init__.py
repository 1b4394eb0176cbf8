"""One model over several processes: its layers are cut into stages, batches go through them in microbatches.

Pure rules first: ``splitting`` (where to cut), ``orders`` (which process does what, from torch's schedules),
``timeline`` (how long that takes), ``routing`` (which values travel where). ``graph`` finds a model's layers,
``stage`` and ``engine`` run them, ``output`` is what the loop sees of it.
"""
