"""What predictors see of a batch of graphs on a device: one module for each set of features.

step            one row for a step: what trees read
operators       one row for each different operator of a step: what the operator network reads
kernel_shapes   the shapes of each different operator: what crosses to cards without measured steps
graph           columns of operators and of the graph: what the graph network for CPUs reads
"""
