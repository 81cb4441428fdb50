"""Features of a graph on a device: one module for each set of features.

step            one row for a step. Trees read it.
launches        the operators of a step in launch order, and the tensors between them. The graph network reads them.
"""
