"""One model over several processes: its layers are cut into stages, batches go through them in microbatches.

Pure rules first: in ``plan`` ``splitting`` (where to cut), ``orders`` (which process does what, from torch's
schedules) and ``timeline`` (how long that takes); ``routing`` (which values travel where). ``graph`` finds a model's
layers, ``plan.measuring`` what they take, ``stage`` and ``engine`` run them, ``weights`` adds the gradients of large
weights, ``output`` is what the loop sees of it.
"""
