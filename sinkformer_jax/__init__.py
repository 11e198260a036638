"""Softmax and Sinkhorn attention under equal terms; see the README."""

__version__ = '0.2.0'
