"""Features of a batch of graphs on a device: one module for each set of features.

step            one row for a step. Trees read it.
operators       one row for each different operator of a step. The operator network reads them.
kernel_shapes   the shapes of each different operator. Models for cards without measured steps read them.
graph           columns of operators and of the graph. The graph network for CPUs reads them.
"""
