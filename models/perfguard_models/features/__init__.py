"""Features of a graph on a device: one module for each set of features.

step            one row for a step. Trees read it.
operators       one row for each different operator of a step. Launches and the papers' kernels read them.
launches        the operators of a step in launch order, and the tensors between them. The graph network reads them.
"""
