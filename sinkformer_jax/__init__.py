"""Softmax and Sinkhorn attention under equal terms; see the README."""
