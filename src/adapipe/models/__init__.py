"""Models as lists of blocks: the reference GPT, initial weights by name, and the cut into stages.

Planning needs their shapes only: `shape`, `partition` and `costs` do not import torch, which takes seconds.
"""
